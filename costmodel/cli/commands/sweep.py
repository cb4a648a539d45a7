"""dsq-cost sweep: all configurations in a range, and those where no bit is free."""

import argparse
from math import prod

import numpy as np

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import facts, hardware_of, heading, setup_of, times_note, workload_of
from costmodel.model.sweep import OBJECTIVES, front, grid, parse_range, sweep
from dsq.command.files import write_whole
from dsq.formats import Format
from dsq.precision import Precision

MAX_CONFIGURATIONS = 500_000
FRONT_ROWS = 20


def run(arguments: argparse.Namespace) -> Answer:
    workload, hardware = workload_of(arguments), hardware_of(arguments)
    objectives = [name.strip() for name in arguments.objectives.split(",")]
    if not set(objectives) <= set(OBJECTIVES) or len(set(objectives)) < 2:
        raise ValueError(f"objectives must be two or more of {', '.join(OBJECTIVES)}, not {arguments.objectives!r}")
    ranges = [parse_range(getattr(arguments, q)) for q in ("q0", "q1", "q2", "q3")]
    count = prod(map(len, ranges))
    if count > MAX_CONFIGURATIONS:
        raise ValueError(f"{count:,} configurations are more than {MAX_CONFIGURATIONS:,}: narrow a range")
    precision = grid(ranges)
    setup = setup_of(arguments, precision)
    unit = setup_of(arguments, arguments.relative_to)
    columns = sweep(workload, setup, hardware, unit)
    kept = front(precision, [columns[name] for name in objectives])
    if arguments.picture:
        from costmodel.cli.pictures.sweep import draw_sweep

        title = f"{workload.name}, {setup.format.name}, {hardware.name}"
        axes, paper = (objectives[0], objectives[1]), _of_the_paper(setup.format)
        write_whole(
            arguments.picture,
            lambda path: draw_sweep(path, title, precision, columns, kept, axes, str(unit), paper),
        )
    on_front = np.flatnonzero(kept)
    rows = on_front[np.argsort(columns[objectives[0]][on_front], kind="stable")]
    picked = not arguments.json and len(rows) > FRONT_ROWS
    listed = rows[np.linspace(0, len(rows) - 1, FRONT_ROWS).round().astype(int)] if picked else rows
    records: list[Record] = [
        {"precision": str(precision[row])} | {name: float(column[row]) for name, column in columns.items()}
        for row in listed.tolist()
    ]
    notes = [
        f"{count:,} configurations; at {len(rows):,} any bit more costs {' or '.join(objectives)}. "
        "What a bit is worth: dsq-cost cheapest.",
        f"dram, arithmetic: relative to {unit}; stash: bytes; time: seconds.",
        times_note(hardware),
    ]
    if picked:
        notes.append(f"{FRONT_ROWS} of them shown, evenly picked; --csv and --json give all.")
    shown = {"precision": "", "dram": ".4f", "arithmetic": ".5f", "stash": ",.0f", "time": ".3e"}
    section = Section("front", f"No bit is free: {heading(workload, hardware)}", records, shown)
    known = facts(workload, hardware)
    known |= {"format": setup.format.name, "objectives": objectives, "configurations": count}
    return Answer([section], notes, known, columns=vars(precision) | columns | {"front": kept})


def _of_the_paper(fmt: Format) -> list[Precision]:
    """The precisions that the paper has figures of in this format, and those of its schedule."""
    from costmodel.paper.published import DSQ_LEVELS, ROWS

    published = (row.precision for row in ROWS if row.precision and row.format.name == fmt.name)
    return list(dict.fromkeys((*published, *DSQ_LEVELS)))
