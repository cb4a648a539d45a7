"""A DSQ run's record of work, as dsq.PrecisionScheduler.history() writes it, and the work-weighted mean of costs.

{"format": "bfp", "box": 16, "box_axis": "contraction", "exclude": "output_projection",
 "levels": [{"precision": [2, 2, 2, 16], "updates": 120, "tokens": 98304}, ...]}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.formats import Format, Precision
from costmodel.workload_file import read_json


@dataclass(frozen=True)
class Level:
    precision: Precision
    updates: int
    tokens: int


@dataclass(frozen=True)
class History:
    levels: tuple[Level, ...]
    format: Format
    exclude: str | None = None  #: regex of the layers that the run left unconverted

    @property
    def unit(self) -> str:
        """What work is weighed by: tokens where every level with work counted them, else updates."""
        return "updates" if any(level.updates and not level.tokens for level in self.levels) else "tokens"

    @property
    def weighing(self) -> str:
        """The unit, and why it is not tokens where some level counted them."""
        partly = self.unit == "updates" and any(level.tokens for level in self.levels)
        return f"{self.unit}, as not every level counted its tokens" if partly else self.unit

    @property
    def shares(self) -> list[float]:
        """Each level's share of the work."""
        work = [getattr(level, self.unit) for level in self.levels]
        return [amount / sum(work) for amount in work]


def load_history(path: str, default: Format) -> History:
    """The record in the file; `default` is the format where it names none. Raises ValueError that names the field."""
    data = read_json(Path(path))
    entries = data.get("levels") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"history {path}: field levels must be a list with at least one level")
    levels = tuple(_level(entry, f"levels[{index}]", path) for index, entry in enumerate(entries))
    if not any(level.updates or level.tokens for level in levels):
        raise ValueError(f"history {path}: no level records any work (updates or tokens)")
    named = {"kind": "format", "box": "box", "box_axis": "box_axis"}
    layout = {field: data[key] for field, key in named.items() if key in data}
    if "box" in layout:
        _whole(layout["box"], "box", path)
    try:
        fmt = replace(default, **layout)
    except ValueError as error:
        raise ValueError(f"history {path}: {error}") from None
    exclude = data.get("exclude")
    if not isinstance(exclude, str | None):
        raise ValueError(f"history {path}: field exclude must be a regular expression or null, not {exclude!r}")
    return History(levels, fmt, exclude)


def _level(entry: Any, label: str, path: str) -> Level:
    if not isinstance(entry, dict) or not isinstance(entry.get("precision"), list):
        raise ValueError(f"history {path}: field {label}.precision must be a list of four widths")
    try:
        precision = Precision.of(entry["precision"])
    except ValueError as error:
        raise ValueError(f"history {path}: field {label}.precision: {error}") from None
    return Level(
        precision,
        _whole(entry.get("updates", 0), f"{label}.updates", path),
        _whole(entry.get("tokens", 0), f"{label}.tokens", path),
    )


def _whole(value: Any, label: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"history {path}: field {label} must be a whole number, 0 or more, not {value!r}")
    return value
