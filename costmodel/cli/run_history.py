"""A DSQ run's record of work, as dsq.PrecisionScheduler.history() writes it, and each level's share of it.

{"format": "bfp", "box": 16, "box_axis": "contraction", "exclude": "output_projection",
 "workload": "dsq_workload.json",
 "levels": [{"precision": [2, 2, 2, 16], "updates": 120, "tokens": 98304}, ...]}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.model.methods import Setup, described_setup, sizes
from dsq.arguments import whole_number
from dsq.command import check_pattern, read_json
from dsq.precision import Precision


@dataclass(frozen=True)
class RunHistory:
    setups: list[Setup]  #: of each level
    shares: list[float]  #: of the work at each level
    unit: str  #: of the work: "tokens" if every level with work counted them, else "updates"
    recorded: dict[str, Any]  #: the options of the format that the record itself states
    exclude: str  #: regex of the layers that the run left unconverted; empty: none
    workload: str  #: workload file of the model that was trained, beside the record; empty: none


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
    setups, work = [], []
    for index, entry in enumerate(entries):
        label = f"field levels[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("precision"), list):
            raise ValueError(f"{label}.precision must be a list of four widths")
        try:
            precision = Precision.parse(str(entry["precision"]))
        except ValueError as error:
            raise ValueError(f"{label}.{error}") from None
        setups.append(described_setup({**described, **recorded}, precision))
        work.append([whole_number(f"{label}.{unit}", entry.get(unit, 0), 0) for unit in ("tokens", "updates")])
    counted = int(any(updates and not tokens for tokens, updates in work))
    done = [amounts[counted] for amounts in work]
    if not any(done):
        raise ValueError("no level records any work (updates or tokens)")
    named = {name: data.get(name) or "" for name in ("exclude", "workload")}
    for name, value in named.items():
        if not isinstance(value, str):
            raise ValueError(f"field {name} must be text or null, not {value!r}")
    check_pattern("field exclude", named["exclude"])
    unit = ("tokens", "updates")[counted]
    return RunHistory(setups, [amount / sum(done) for amount in done], unit, recorded, **named)
