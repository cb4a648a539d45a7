"""The paper's tables beside ours: a record a row, with what is published, what is computed, and how far that is off."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from costmodel.hardware.hardware import Hardware
from costmodel.model.methods import BF16, Setup
from costmodel.model.roofline import Floor, evaluate
from costmodel.paper import calibrated, published
from costmodel.workloads.named import load_workload
from dsq.formats import FixedPoint
from dsq.precision import Precision

Record = dict[str, Any]


def static_rows(table: int) -> list[Record]:
    """The rows of table 1 or 6, DSQ's aside. fits: the constant of the model that the figure chose, "test" where it
    chose none; residual: ours - published; off: the residual as a share of what is published."""
    return [_static(row) for row in published.ROWS if row.table == table and row.precision is not None]


def _static(row: published.Row) -> Record:
    setup = str(row.setup)
    record: Record = {"dataset": row.dataset, "setup": setup}
    residuals: Record = {}
    arithmetic, dram = _costs(row, row.setup)
    for name, stated, ours, chose in (
        ("arith", row.arithmetic, arithmetic, calibrated.FITTED_ARITHMETIC),
        ("dram", row.dram, dram, calibrated.FITTED_DRAM),
    ):
        record |= {f"{name}_paper": stated, f"{name}_ours": ours, f"{name}_off": (ours - stated) / stated}
        record |= {f"{name}_fits": chose.get(setup, "test")}
        residuals |= {f"{name}_residual": ours - stated}
    return record | {"method": row.method, "precision": str(row.precision), "contradicts": row.contradicts} | residuals


def dsq_rows() -> list[Record]:
    """Table 1's DSQ rows, each column as a run that did a share of its work at the second level, the rest at the first.

    IWSLT's against the headline's unrounded figures. share_alone: the share that would match the one column, outside of
    0..1 if no run can; share_best: the one in 0..1 that minimises the squared residuals of both.
    """
    return [record for row in published.ROWS if row.precision is None for record in _dsq(row)]


def _dsq(row: published.Row) -> Iterator[Record]:
    stated = (row.arithmetic, row.dram)
    if row.workload == "transformer_iwslt_de_en":
        sixteen = _costs(row, Setup(FixedPoint(16), Precision(16, 16, 16, 16)))
        stated = (sixteen[0] / published.HEADLINE_ARITHMETIC, sixteen[1] / published.HEADLINE_DRAM)
    levels = (_costs(row, Setup(row.format, level)) for level in published.DSQ_LEVELS)
    columns = list(zip(("arithmetic", "dram"), stated, *levels, strict=True))
    share = best_share([(goal, first, second) for _, goal, first, second in columns])
    for name, goal, first, second in columns:
        ours = first + share * (second - first)
        record: Record = {"dataset": row.dataset, "column": name, "published": goal, "level_1": first}
        record |= {"level_2": second, "share_alone": (goal - first) / (second - first), "share_best": share}
        yield record | {"ours": ours, "residual": ours - goal, "off": (ours - goal) / goal}


def best_share(columns: list[tuple[float, float, float]]) -> float:
    """The share in 0..1 at the second level that minimises the squared residuals; columns: published, first, second."""
    best = sum((second - first) * (goal - first) for goal, first, second in columns)
    return min(1.0, max(0.0, best / sum((second - first) ** 2 for _, first, second in columns)))


def _costs(row: published.Row, setup: Setup) -> tuple[float, float]:
    """(arithmetic, DRAM) of the row's workload."""
    return float(calibrated.arithmetic(setup)), float(calibrated.dram(load_workload(row.workload), setup))


def table_7(hardware: Hardware) -> list[Record]:
    """OPT-1.3B trained in 16-bit floating point: bound and share of the time floor of attention, FC layers and the
    rest. share_ours leaves the optimiser's update out, with_adam has it in "other"."""
    workload = load_workload("opt_1.3b", fused=False)
    step = replace(workload, operations=tuple(op for op in workload.operations if op.name != "optimiser"))
    alone, updated = (evaluate(costed, BF16, hardware).classes for costed in (step, workload))
    records = []
    for cls, floor in alone.items():
        stated, bound = published.TABLE_7[cls]
        share = _time_share(alone, cls)
        record: Record = {"class": cls, "flop_per_byte": float(floor.intensity), "ridge": float(floor.ridge)}
        record |= {"bound_paper": bound, "bound_ours": "memory" if floor.memory_bound else "compute"}
        record |= {"share_paper": stated, "share_ours": share, "off": (share - stated) / stated}
        records.append(record | {"with_adam": _time_share(updated, cls), "residual": share - stated})
    return records


def _time_share(classes: dict[str, Floor], cls: str) -> float:
    return float(classes[cls].seconds / sum(floor.seconds for floor in classes.values()))
