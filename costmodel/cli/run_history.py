"""A DSQ run's record of work, as dsq.PrecisionScheduler.history() writes it, and each level's share of it.

{"format": "bfp", "box": 16, "box_axis": "contraction", "exclude": "output_projection",
 "workload": "dsq_workload.json",
 "levels": [{"precision": [2, 2, 2, 16], "updates": 120, "tokens": 98304}, ...]}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.model.quantisation import Setup, described_setup, sizes
from dsq.arguments import whole_number
from dsq.command import check_pattern, read_json
from dsq.precision import Precision


@dataclass(frozen=True)
class LevelWork:
    """The work of a run at one level."""

    setup: Setup
    updates: int
    tokens: int


@dataclass(frozen=True)
class RunHistory:
    levels: tuple[LevelWork, ...]
    recorded: dict[str, Any]  #: the options of the format that the record itself states
    exclude: str | None = None  #: regex of the layers that the run left unconverted
    workload: str | None = None  #: workload file of the model that was trained, beside the record

    @property
    def unit(self) -> str:
        """The unit of work: tokens if every level with work counted them, else updates."""
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


def load_history(path: str, described: Mapping[str, Any]) -> RunHistory:
    """The record in the file; `described` holds those options of the format that it leaves out, and the container.

    Raises ValueError that names the file and the field.
    """
    data = read_json(Path(path))
    try:
        return _history(data if isinstance(data, dict) else {}, described)
    except ValueError as error:
        raise ValueError(f"history {path}: {error}") from None


def _history(data: dict[str, Any], described: Mapping[str, Any]) -> RunHistory:
    entries = data.get("levels")
    if not isinstance(entries, list) or not entries:
        raise ValueError("field levels must be a list with at least one level")
    fields = ("format", "box_axis", *sizes(data.get("format", described["format"])))
    recorded = {field: data[field] for field in fields if field in data}
    levels = tuple(_level(entry, f"levels[{i}]", {**described, **recorded}) for i, entry in enumerate(entries))
    if not any(level.updates or level.tokens for level in levels):
        raise ValueError("no level records any work (updates or tokens)")
    exclude = data.get("exclude")
    if not isinstance(exclude, str | None):
        raise ValueError(f"field exclude must be a regular expression or null, not {exclude!r}")
    if exclude:
        check_pattern("field exclude", exclude)
    workload = data.get("workload")
    if not isinstance(workload, str | None):
        raise ValueError(f"field workload must be the name of a file beside the history or null, not {workload!r}")
    return RunHistory(levels, recorded, exclude, workload)


def _level(entry: Any, label: str, described: Mapping[str, Any]) -> LevelWork:
    if not isinstance(entry, dict) or not isinstance(entry.get("precision"), list):
        raise ValueError(f"field {label}.precision must be a list of four widths")
    try:
        precision = Precision.parse(str(entry["precision"]))
    except ValueError as error:
        raise ValueError(f"field {label}.{error}") from None
    updates, tokens = (whole_number(f"field {label}.{unit}", entry.get(unit, 0), 0) for unit in ("updates", "tokens"))
    return LevelWork(described_setup(described, precision), updates, tokens)
