"""dsq-cost estimate: precisions, or a finished run, in one line each.

A finished run is read from its record of work, as dsq.PrecisionScheduler.history() and dsq-train write it:

{"format": "bfp", "box": 16, "box_axis": "contraction", "workload": "dsq_workload.json",
 "levels": [{"precision": [2, 2, 2, 16], "updates": 120, "tokens": 98304}, ...]}
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.cli.answer import Answer, Record, Section, facts, floor_record, heading, refuse_idle, setups_of
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.methods import Setup, described_setup, sizes
from costmodel.model.operations import Workload
from costmodel.model.roofline import evaluate
from costmodel.paper.calibrated import level_costs, shares
from costmodel.workloads.named import asked
from dsq.arguments import whole_number
from dsq.command import read_json
from dsq.precision import Precision, parse_rise_at

#: options that change nothing in the paper profile, which costs linear layers and knows no hardware
IGNORED_BY_PAPER = (
    *("hardware", "exclude", "freeze", "tied", "quantise_attention", "fused_attention"),
    *("eager_attention", "chunked_loss", "box_axis", "container"),
)


def run(arguments: argparse.Namespace) -> Answer:
    if bool(arguments.precision) == bool(arguments.history):
        raise ValueError("give one or more precisions, or --history FILE, and not both")
    if arguments.history:
        return _finished_run(arguments, load_history(arguments.history, vars(arguments)))
    setups = setups_of(arguments, arguments.precision)
    return _estimated(arguments, asked(**vars(arguments)).build(), setups, _shares(arguments.rise_at, len(setups)))


@dataclass(frozen=True)
class RunHistory:
    """A run's record of work."""

    setups: list[Setup]  #: of each level
    shares: list[float]  #: of the work at each level
    unit: str  #: of the work: "tokens" if every level with work counted them, else "updates"
    recorded: dict[str, Any]  #: the options of the format that the record itself states
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
    entries, workload = data.get("levels"), data.get("workload") or ""
    if not isinstance(entries, list) or not entries:
        raise ValueError("field levels must be a list with at least one level")
    if not isinstance(workload, str):
        raise ValueError(f"field workload must be the name of a file beside the history or null, not {workload!r}")
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
    unit = ("tokens", "updates")[counted]
    return RunHistory(setups, [amount / sum(done) for amount in done], unit, recorded, workload)


def _finished_run(arguments: argparse.Namespace, history: RunHistory) -> Answer:
    if arguments.rise_at:
        raise ValueError("rise_at goes with precisions: a history has the work at each level")
    for option, recorded in history.recorded.items():
        given = getattr(arguments, option)
        if given not in (arguments.parser.get_default(option), recorded):
            raise ValueError(f"--{option.replace('_', '-')} {given} does nothing: the history records {recorded}")
    if history.workload and arguments.workload == arguments.parser.get_default("workload"):
        arguments.workload = str(Path(arguments.history).with_name(history.workload))
    workload = asked(**vars(arguments)).build()
    notes = [f"mean: weighed by each level's share of {history.unit}."]
    if not history.workload:
        notes.append(f"the history names no workload: costed as {workload.name}.")
    return _estimated(arguments, workload, history.setups, history.shares, notes)


def _shares(rise_at: str | None, levels: int) -> list[float]:
    """Each level's share of a run, as --rise-at says; none without it. Raises ValueError where it does not fit."""
    if not rise_at:
        return []
    try:
        moments = [float(word) for word in rise_at.split()]
    except ValueError:
        moments = []
    if not moments or not all(0 < moment < 1 for moment in moments):
        raise ValueError(f"rise_at must be fractions of the run between 0 and 1, as in 0.8, got {rise_at!r}")
    return shares(parse_rise_at(moments, levels))


def _estimated(
    arguments: argparse.Namespace,
    workload: Workload,
    setups: list[Setup],
    worked: Sequence[float],
    notes: Sequence[str] = (),
) -> Answer:
    """A record for each setup, and their mean by the shares of the work that a run did at each."""
    units = setups_of(arguments, [arguments.relative_to])
    if len(units) > 1:
        raise ValueError(f"relative_to must be one precision, as [16,4,4,16], got {arguments.relative_to!r}")
    shown: dict[str, str] = {"share": ".1%"} if worked else {}
    if arguments.profile == "paper":
        refuse_idle(arguments, IGNORED_BY_PAPER, "in the paper profile")
        records, known = _by_paper(workload, setups, units[0]), facts(workload)
        title = f"{workload.name}, paper profile, relative to {units[0]}"
        shown |= {"arithmetic": ".4f", "dram": ".4f"}
    else:
        hardware = load_hardware(arguments.hardware)
        records = _from_first_principles(workload, setups, units[0], hardware)
        title, known = heading(workload, hardware), facts(workload, hardware)
        shown |= {"dram_MB": ",.0f", "dram": ".3f", "linears_stash_MB": ",.1f", "model_saved_MB": ",.0f"}
        shown |= {"arithmetic": ".3f", "flop_per_byte": ",.0f", "bound": "", "floor_ms": ",.1f"}
        meant = (
            f"a training step; dram and arithmetic: relative to {units[0]}; linears stash: what the converted layers "
            "keep for the backward; model saved: what the whole model keeps."
        )
        notes = [meant, f"times: {hardware.rates}.", *notes]
    if worked:
        records.append(_mean_record(records, worked))
    return Answer([Section("estimates", title, records, {"setup": "", **shown})], list(notes), known)


def _by_paper(workload: Workload, setups: list[Setup], unit: Setup) -> list[Record]:
    whole, *costs = level_costs(workload, [unit, *setups])
    return [
        _named(setup) | {"arithmetic": cost.arithmetic / whole.arithmetic, "dram": cost.dram / whole.dram}
        for setup, cost in zip(setups, costs, strict=True)
    ]


def _from_first_principles(workload: Workload, setups: list[Setup], unit: Setup, hardware: Hardware) -> list[Record]:
    whole, *costs = (evaluate(workload, setup, hardware) for setup in (unit, *setups))
    return [
        _named(setup)
        | {
            "dram_MB": cost.dram_bytes / 1e6,
            "dram": cost.dram_bytes / whole.dram_bytes,
            "linears_stash_MB": cost.stash_bytes / 1e6,
            "model_saved_MB": cost.saved_bytes / 1e6,
            "arithmetic": cost.arithmetic / whole.arithmetic,
            **floor_record(cost.total),
        }
        for setup, cost in zip(setups, costs, strict=True)
    ]


def _named(setup: Setup) -> Record:
    return {"setup": str(setup), "format": setup.format.name, "precision": str(setup.precision)}


#: columns that are rates or names, of which a run has no mean
_NO_COSTS = ("setup", "format", "precision", "share", "flop_per_byte", "ridge", "bound")


def _mean_record(records: list[Record], worked: Sequence[float]) -> Record:
    """The run's record; each level's is given its share."""
    for record, share in zip(records, worked, strict=True):
        record["share"] = share
    mean: Record = {"setup": f"{records[0]['format']} mean", "format": records[0]["format"], "precision": "mean"}
    mean["share"] = 1.0
    costs = [name for name in records[0] if name not in _NO_COSTS]
    return mean | {name: sum(record[name] * record["share"] for record in records) for name in costs}
