"""dsq-cost roofline: intensity, bound and time floor of each operation class, and the picture."""

import argparse

from costmodel.cli.output import Report, Section
from costmodel.cli.query import facts, floor_record, hardware_of, heading, setup_of, times_note, workload_of
from costmodel.model.arithmetic import matmuls
from costmodel.model.estimate import evaluate
from costmodel.model.roofline import datatypes
from dsq.command.files import write_whole


def run(arguments: argparse.Namespace) -> Report:
    workload, hardware = workload_of(arguments), hardware_of(arguments)
    setups = [setup_of(arguments, text) for text in arguments.precision]
    costs = [evaluate(workload, setup, hardware) for setup in setups]
    records = []
    for setup, cost in zip(setups, costs, strict=True):
        for cls, floor in {**cost.classes, "total": cost.total}.items():
            share = float(floor.seconds / cost.total.seconds)
            records.append(
                {
                    "setup": str(setup),
                    "format": setup.format.name,
                    "precision": str(setup.precision),
                    "class": cls,
                    **floor_record(floor),
                }
                | {"runs_in": datatypes(matmuls(workload, setup), cls, hardware)}
                | {"dram_MB": float(floor.bytes) / 1e6, "of_time": share}
            )
    if arguments.picture:
        from costmodel.cli.pictures import draw_roofline

        points = [(str(setup), cost.total) for setup, cost in zip(setups, costs, strict=True)]
        write_whole(arguments.picture, lambda path: draw_roofline(path, workload.name, hardware, points))
    shown = {"setup": "", "class": "", "dram_MB": ",.0f", "flop_per_byte": ",.0f"}
    shown |= {"ridge": ",.0f", "runs_in": "", "bound": "", "floor_ms": ",.1f", "of_time": ".1%"}
    return Report(
        [Section("classes", heading(workload, hardware), records, shown)],
        [times_note(hardware)],
        facts(workload, hardware),
    )
