"""dsq-cost roofline: intensity, bound and time floor of each operation class, and the picture."""

from __future__ import annotations

import argparse

from costmodel.arithmetic import products
from costmodel.commands.query import facts, floor_record, format_of, heading, setups_of, workload_of
from costmodel.estimate import evaluate
from costmodel.hardware import load_hardware
from costmodel.output import Report, Section, write_whole
from costmodel.roofline import datatypes


def run(arguments: argparse.Namespace) -> Report:
    workload, hardware = workload_of(arguments), load_hardware(arguments.hardware)
    setups = setups_of(arguments.precision, format_of(arguments))
    costs = [evaluate(workload, precision, fmt, hardware) for fmt, precision in setups]
    records = []
    for (fmt, precision), cost in zip(setups, costs, strict=True):
        for cls, floor in {**cost.classes, "total": cost.total}.items():
            share = float(floor.seconds / cost.total.seconds)
            records.append(
                {"format": fmt.kind, "precision": str(precision), "class": cls, **floor_record(floor)}
                | {"runs_in": datatypes(products(workload, precision, fmt.kind), cls, hardware)}
                | {"dram_MB": float(floor.bytes) / 1e6, "of_time": share}
            )
    if arguments.picture:
        from costmodel.pictures import draw_roofline

        points = [(f"{fmt.kind} {precision}", cost.total) for (fmt, precision), cost in zip(setups, costs, strict=True)]
        write_whole(arguments.picture, lambda path: draw_roofline(path, workload.name, hardware, points))
    shown = {"format": "", "precision": "", "class": "", "gflop": ",.1f", "dram_MB": ",.1f", "flop_per_byte": ",.1f"}
    shown |= {"ridge": ",.1f", "runs_in": "", "bound": "", "floor_ms": ",.3f", "of_time": ".1%"}
    return Report([Section("classes", heading(workload, hardware), records, shown)], facts=facts(workload, hardware))
