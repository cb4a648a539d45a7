"""dsq-cost estimate: precisions, or a finished run, in one line each."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import (
    check_paper,
    facts,
    floor_record,
    hardware_of,
    heading,
    setup_of,
    setups_of,
    times_note,
    workload_of,
)
from costmodel.cli.run_history import RunHistory, load_history
from costmodel.model.estimate import Estimate, evaluate
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup
from costmodel.paper import calibrated
from costmodel.paper.run_cost import shares as shares_of
from dsq.precision import parse_rise_at


def run(arguments: argparse.Namespace) -> Answer:
    if bool(arguments.precision) == bool(arguments.history):
        raise ValueError("give one or more precisions, or --history FILE, and not both")
    history, excluded = None, ""
    setups = setups_of(arguments, arguments.precision)
    shares = _shares(arguments, len(setups))
    if arguments.history:
        history = load_history(arguments.history, vars(arguments))
        shares = history.shares
        _check_options(arguments, history)
        if history.workload and arguments.workload == arguments.parser.get_default("workload"):
            arguments.workload = str(Path(arguments.history).with_name(history.workload))
    workload = workload_of(arguments)
    if history:
        setups = [level.setup for level in history.levels]
        if history.exclude and arguments.exclude is None:
            workload, excluded = _as_the_run(workload, history.exclude, arguments.profile)
    estimated = _paper if arguments.profile == "paper" else _first_principles
    records, shown, title, notes, known = estimated(arguments, workload, setups)
    if shares:
        records.append(_mean_record(records, shares))
        shown = {"setup": shown.pop("setup"), "share": ".1%"} | shown
    if history:
        notes.append(f"mean: weighed by each level's share of {history.weighing}.")
        if not history.workload:
            notes.append(f"the history names no workload: costed as {workload.name}.")
        notes += [excluded] if excluded else []
    return Answer([Section("estimates", title, records, shown)], notes, known)


def _shares(arguments: argparse.Namespace, levels: int) -> list[float]:
    """Each level's share of a run, as --rise-at says; none without it. Raises ValueError where it does not fit."""
    if not arguments.rise_at:
        return []
    if arguments.history:
        raise ValueError("rise_at goes with precisions: a history has the work at each level")
    try:
        moments = [float(word) for word in arguments.rise_at.split()]
    except ValueError:
        moments = []
    if not moments or not all(0 < moment < 1 for moment in moments):
        raise ValueError(f"rise_at must be fractions of the run between 0 and 1, as in 0.8, got {arguments.rise_at!r}")
    return shares_of(parse_rise_at(moments, levels))


#: records, shown columns, title, notes and facts
Estimated = tuple[list[Record], dict[str, str], str, list[str], Record]


def _paper(arguments: argparse.Namespace, workload: Workload, setups: list[Setup]) -> Estimated:
    check_paper(arguments)
    unit = setup_of(arguments, arguments.relative_to)
    units = float(calibrated.arithmetic(unit)), float(calibrated.dram(workload, unit))
    costs = [
        (float(calibrated.arithmetic(setup)) / units[0], float(calibrated.dram(workload, setup)) / units[1])
        for setup in setups
    ]
    records = [_named(setup) | {"arithmetic": a, "dram": d} for setup, (a, d) in zip(setups, costs, strict=True)]
    shown = {"setup": "", "arithmetic": ".4f", "dram": ".4f"}
    return records, shown, f"{workload.name}, paper profile, relative to {unit}", [], facts(workload)


def _first_principles(arguments: argparse.Namespace, workload: Workload, setups: list[Setup]) -> Estimated:
    hardware = hardware_of(arguments)
    unit = setup_of(arguments, arguments.relative_to)
    reference = evaluate(workload, unit, hardware)
    records = [_record(setup, evaluate(workload, setup, hardware), reference) for setup in setups]
    shown = {"setup": "", "dram_MB": ",.0f", "dram": ".3f", "linears_stash_MB": ",.1f", "model_saved_MB": ",.0f"}
    shown |= {"arithmetic": ".3f", "flop_per_byte": ",.0f", "bound": "", "floor_ms": ",.1f"}
    notes = [
        f"a training step; dram and arithmetic: relative to {unit}; linears "
        "stash: what the converted layers keep for the "
        "backward; model saved: what the whole model keeps.",
        times_note(hardware),
    ]
    return records, shown, heading(workload, hardware), notes, facts(workload, hardware)


def _check_options(arguments: argparse.Namespace, history: RunHistory) -> None:
    """Raises ValueError for an option of the format that the run's own record overrules."""
    for option, recorded in history.recorded.items():
        given = getattr(arguments, option)
        if given not in (arguments.parser.get_default(option), recorded):
            raise ValueError(f"--{option.replace('_', '-')} {given} does nothing: the history records {recorded}")


def _as_the_run(workload: Workload, pattern: str, profile: str) -> tuple[Workload, str]:
    """The workload with the layers unconverted that the run left so, and a note of what that changes."""
    whole, workload = workload, workload.excluding(pattern)
    if profile == "paper":
        change = "changes nothing: the paper profile costs every linear layer"
    elif workload == whole:  # no error: the workload may name layers otherwise, or have them unconverted already
        change = "changes nothing: it matches none of the workload's converted layers"
    else:
        change = "leaves the layers that it matches unconverted"
    return workload, f"the run's exclude {pattern!r} {change}."


def _named(setup: Setup) -> Record:
    return {"setup": str(setup), "format": setup.format.name, "precision": str(setup.precision)}


def _record(setup: Setup, cost: Estimate, reference: Estimate) -> Record:
    return _named(setup) | {
        "dram_MB": float(cost.dram_bytes) / 1e6,
        "dram": float(cost.dram_bytes / reference.dram_bytes),
        "linears_stash_MB": float(cost.stash_bytes) / 1e6,
        "model_saved_MB": float(cost.saved_bytes) / 1e6,
        "arithmetic": float(cost.arithmetic / reference.arithmetic),
        "multiplier_Tbit": float(cost.multiplier_work) / 1e12,
        **floor_record(cost.total),
    }


#: columns of a step that are costs: those of a run are their means; rates and names have none
_COSTS = (
    *("dram_MB", "dram", "linears_stash_MB", "model_saved_MB"),
    *("arithmetic", "multiplier_Tbit", "gflop", "floor_ms"),
)


def _mean_record(records: list[Record], shares: Sequence[float]) -> Record:
    """The run's record; each level's is given its share."""
    for record, share in zip(records, shares, strict=True):
        record["share"] = share
    fmt = records[0]["format"]
    mean: Record = {"setup": f"{fmt} mean", "format": fmt, "precision": "mean", "share": 1.0}
    return mean | {
        cost: sum(record[cost] * record["share"] for record in records) for cost in _COSTS if cost in records[0]
    }
