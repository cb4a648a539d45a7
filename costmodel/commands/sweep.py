"""dsq-cost sweep: all configurations in a range, and the Pareto front."""

from __future__ import annotations

import argparse

import numpy as np

from costmodel.commands.query import facts, format_of, heading, workload_of
from costmodel.formats import Precision
from costmodel.hardware import load_hardware
from costmodel.output import Record, Report, Section, write_whole
from costmodel.sweep import OBJECTIVES, Sweep, grid, pareto, parse_range, sweep

MAX_CONFIGURATIONS = 500_000
FRONT_ROWS = 20


def run(arguments: argparse.Namespace) -> Report:
    workload, hardware, fmt = workload_of(arguments), load_hardware(arguments.hardware), format_of(arguments)
    objectives = [name.strip() for name in arguments.objectives.split(",")]
    unknown = [name for name in objectives if name not in OBJECTIVES]
    if unknown or len(set(objectives)) < 2:
        raise ValueError(f"objectives must be two or more of {', '.join(OBJECTIVES)}, not {arguments.objectives!r}")
    ranges = [parse_range(getattr(arguments, q)) for q in ("q0", "q1", "q2", "q3")]
    count = int(np.prod([len(widths) for widths in ranges]))
    if count > MAX_CONFIGURATIONS:
        raise ValueError(f"{count:,} configurations are more than {MAX_CONFIGURATIONS:,}: narrow a range")
    found = sweep(workload, grid(ranges), fmt, hardware)
    front = pareto([found.columns[name] for name in objectives])
    if arguments.picture:
        from costmodel.pictures import draw_sweep

        title = f"{workload.name}, {fmt.kind}, {hardware.name}"
        write_whole(arguments.picture, lambda path: draw_sweep(path, title, found, front, objectives[0], objectives[1]))
    rows = np.flatnonzero(front)
    rows = rows[np.argsort(found.columns[objectives[0]][rows], kind="stable")]
    shown = {"precision": "", "dram": ".4f", "arithmetic": ".5f", "stash": ",.0f", "time": ".3e", "noise": ".1f"}
    notes = [
        f"{count:,} configurations, {len(rows):,} on the front of {', '.join(objectives)}.",
        "dram, arithmetic: relative to fixed-point 32; stash: bytes; time: seconds; noise: dB of first-order "
        "rounding noise, no prediction of accuracy.",
    ]
    known = facts(workload, hardware) | {"format": fmt.kind, "objectives": objectives, "configurations": count}
    title = f"Pareto front: {heading(workload, hardware)}"
    records = [_sweep_record(found, int(row)) for row in rows]
    if not arguments.json and len(records) > FRONT_ROWS:
        picked = np.linspace(0, len(records) - 1, FRONT_ROWS).round().astype(int)
        records = [records[i] for i in picked]
        notes.append(f"{FRONT_ROWS} of them shown, evenly picked; --csv and --json give all.")
    return Report([Section("front", title, records, shown)], notes, known, columns=_columns(found, front))


def _columns(found: Sweep, front: np.ndarray) -> dict[str, np.ndarray]:
    widths = {name: getattr(found.precision, name) for name in ("q0", "q1", "q2", "q3")}
    return widths | found.columns | {"pareto": front}


def _sweep_record(found: Sweep, row: int) -> Record:
    precision = Precision(*(int(width[row]) for width in found.precision.widths))
    return {"precision": str(precision)} | {name: float(column[row]) for name, column in found.columns.items()}
