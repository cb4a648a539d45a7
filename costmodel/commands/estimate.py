"""dsq-cost estimate: precisions, or a finished run, in one line each."""

from __future__ import annotations

import argparse
from dataclasses import replace

from costmodel import paper
from costmodel.commands.query import Setup, check_paper, facts, floor_record, format_of, heading, setups_of, workload_of
from costmodel.estimate import REFERENCE, Estimate, evaluate
from costmodel.formats import Format, Precision
from costmodel.hardware import load_hardware
from costmodel.history import History, load_history
from costmodel.operations import Workload
from costmodel.output import Record, Report, Section


def run(arguments: argparse.Namespace) -> Report:
    if bool(arguments.precision) == bool(arguments.history):
        raise ValueError("give one or more precisions, or --history FILE, and not both")
    workload, fmt, excluded = workload_of(arguments), format_of(arguments), ""
    if arguments.history:
        history = load_history(arguments.history, fmt)
        _check_format(arguments, history.format)
        setups = [(history.format, level.precision) for level in history.levels]
        if history.exclude and arguments.exclude is None:
            workload, excluded = _as_the_run(workload, history.exclude, arguments.profile)
    else:
        history, setups = None, setups_of(arguments.precision, fmt)
    if arguments.profile == "paper":
        check_paper(arguments)
        records = [_paper_record(workload, *setup) for setup in setups]
        report = Report(
            [Section("estimates", f"{workload.name}, paper profile, relative to fixed-point 32", records)],
            facts=facts(workload),
        )
        shown = {"format": "", "precision": "", "arithmetic": ".4f", "dram": ".4f"}
    else:
        hardware = load_hardware(arguments.hardware)
        reference = evaluate(workload, *REFERENCE, hardware)
        records = [_record(setup, evaluate(workload, setup[1], setup[0], hardware), reference) for setup in setups]
        shown = {
            "format": "",
            "precision": "",
            "dram_MB": ",.1f",
            "dram": ".3f",
            "stash_MB": ",.2f",
            "multiplier_Tbit": ",.1f",
            "arithmetic": ".4f",
            "flop_per_byte": ",.1f",
            "ridge": ",.1f",
            "bound": "",
            "floor_ms": ",.3f",
        }
        notes = [
            "a training step; dram and arithmetic: relative to fixed-point 32; multiplier: operand width x operand "
            "width, summed over multiply-accumulates; stash: what the converted linear layers keep for the backward; "
            "ridge: the intensity at which this mix of datatypes turns compute-bound."
        ]
        report = Report([Section("estimates", heading(workload, hardware), records)], notes, facts(workload, hardware))
    if history:
        records.append(_mean_record(records, history))
        shown = {"format": "", "precision": "", "share": ".1%"} | {
            k: v for k, v in shown.items() if k not in ("format", "precision")
        }
        report.notes.append(f"mean: weighed by each level's share of {history.weighing}.")
        if excluded:
            report.notes.append(excluded)
    return replace(report, sections=[replace(report.sections[0], shown=shown)])


def _check_format(arguments: argparse.Namespace, recorded: Format) -> None:
    """Raises ValueError for an option of the format that the run's own record overrules."""
    for option, field in (("format", "kind"), ("box", "box"), ("box_axis", "box_axis")):
        given, found = getattr(arguments, option), getattr(recorded, field)
        if given not in (arguments.parser.get_default(option), found):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} {given} does nothing: the history records {found}")


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


def _paper_record(workload: Workload, fmt: Format, precision: Precision) -> Record:
    return {
        "format": fmt.kind,
        "precision": str(precision),
        "arithmetic": float(paper.arithmetic(precision, fmt)),
        "dram": float(paper.dram(workload, precision, fmt)),
    }


def _record(setup: Setup, cost: Estimate, reference: Estimate) -> Record:
    fmt, precision = setup
    total = cost.total
    return {
        "format": fmt.kind,
        "precision": str(precision),
        "dram_MB": float(cost.dram_bytes) / 1e6,
        "dram": float(cost.dram_bytes / reference.dram_bytes),
        "stash_MB": float(cost.stash_bytes) / 1e6,
        "arithmetic": float(cost.arithmetic / reference.arithmetic),
        "multiplier_Tbit": float(cost.multiplier_bits) / 1e12,
        **floor_record(total),
    }


def _mean_record(records: list[Record], history: History) -> Record:
    mean: Record = {"format": history.format.kind, "precision": "mean", "share": 1.0}
    for record, share in zip(records, history.shares, strict=True):
        record["share"] = share
    for name in ("dram_MB", "dram", "stash_MB", "arithmetic", "multiplier_Tbit", "gflop", "floor_ms"):
        if name in records[0]:
            mean[name] = sum(record[name] * record["share"] for record in records)
    return mean
