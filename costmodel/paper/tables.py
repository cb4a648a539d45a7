"""Tables 1, 6 and 7 of the paper (Yang, Lo, Mullins and Zhao, Dynamic Stashing Quantization, 2023) beside ours: a
record a row, with what is published, what is computed, and how far that is off.

Nothing that computes a cost reads this file; costs are relative to fixed-point 32, as the paper's are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.hardware.hardware import Hardware
from costmodel.model.methods import BF16, Setup
from costmodel.model.roofline import Floor, evaluate
from costmodel.paper import calibrated
from costmodel.workloads.named import load_workload
from dsq.formats import BFP, WIDEST, FixedPoint
from dsq.precision import Precision


@dataclass(frozen=True)
class PublishedRow:
    table: int
    dataset: str
    workload: str  #: a name of named.names()
    method: str
    setup: Setup | None  #: None: a DSQ run, averaged over its levels
    arithmetic: float
    dram: float
    contradicts: str = ""  #: why this figure cannot be right


_FIXED, _BFP = FixedPoint(WIDEST), BFP(WIDEST)
_STASHING = Precision(16, 4, 4, 16)
_METHODS = (
    ("Fixed-point", Setup(_FIXED, Precision(32, 32, 32, 32))),
    ("Fixed-point", Setup(_FIXED, Precision(16, 16, 16, 16))),
    ("Block FP", Setup(_BFP, Precision(32, 32, 32, 32))),
    ("Block FP", Setup(_BFP, Precision(16, 16, 16, 16))),
    ("Stashing (Fixed)", Setup(_FIXED, _STASHING)),
    ("Stashing (BFP)", Setup(_BFP, _STASHING)),
    ("DSQ (BFP)", None),
)


def _rows(table: int, dataset: str, workload: str, columns: Sequence[tuple[float, ...]]) -> Iterator[PublishedRow]:
    for (method, setup), arithmetic, dram in zip(_METHODS, *columns, strict=False):
        yield PublishedRow(table, dataset, workload, method, setup, arithmetic, dram)


_IWSLT = ((1.00, 0.25, 0.56, 0.18, 0.13, 0.10, 0.012), (1.00, 0.50, 1.13, 0.63, 0.31, 0.45, 0.20))
_GLUE = ((1.00, 0.25, 0.56, 0.18, 0.13, 0.10, 0.043), (1.00, 0.50, 1.13, 0.63, 0.32, 0.45, 0.26))
_WMT = ("WMT14 EN-DE", "transformer_wmt_en_de")
_SLIP = "table 1 prints 0.45x for the same setup on the same layers"

#: tables 1 and 6
ROWS = (
    *_rows(1, "IWSLT17 DE-EN", "transformer_iwslt_de_en", _IWSLT),
    *_rows(1, "GLUE MNLI", "roberta_base_mnli", _GLUE),
    *_rows(1, "GLUE QNLI", "roberta_base_qnli", _GLUE),
    *_rows(6, *_WMT, ((1.00, 0.25, 0.56, 0.18, 0.13), (1.00, 0.50, 1.13, 0.63, 0.31))),
    PublishedRow(6, *_WMT, "Stashing (BFP)", Setup(_BFP, _STASHING), 0.10, 0.20, _SLIP),
)
#: the levels of a DSQ run (appendix B)
DSQ_LEVELS = (Precision(2, 2, 2, 16), _STASHING)
#: abstract: reductions of DSQ on IWSLT17 against fixed-point 16, which table 1 rounds (the introduction swaps the two)
HEADLINE_ARITHMETIC, HEADLINE_DRAM = 20.95, 2.55
#: table 7: OPT-1.3B, share of latency and bound
TABLE_7 = {"attention": (0.4793, "memory"), "fc": (0.3220, "compute"), "other": (0.1987, "memory")}

Record = dict[str, Any]


def static_rows(table: int) -> list[Record]:
    """The rows of table 1 or 6, DSQ's aside. fits: the constant of the model that the figure chose, "test" where it
    chose none; residual: ours - published; off: the residual as a share of what is published."""
    return [_static(row, row.setup) for row in ROWS if row.table == table and row.setup]


def _static(row: PublishedRow, setup: Setup) -> Record:
    record: Record = {"dataset": row.dataset, "setup": str(setup)}
    residuals: Record = {"method": row.method, "precision": str(setup.precision), "contradicts": row.contradicts}
    fitted = (calibrated.FITTED_ARITHMETIC, calibrated.FITTED_DRAM)
    columns = zip(("arith", "dram"), (row.arithmetic, row.dram), _costs(row, setup), fitted, strict=True)
    for name, stated, ours, chose in columns:
        record |= {f"{name}_paper": stated, f"{name}_ours": ours, f"{name}_off": (ours - stated) / stated}
        record |= {f"{name}_fits": chose.get(str(setup), "test")}
        residuals |= {f"{name}_residual": ours - stated}
    return record | residuals


def dsq_rows() -> list[Record]:
    """Table 1's DSQ rows, each column as a run that did a share of its work at the second level, the rest at the first;
    IWSLT's against the headline's unrounded figures.

    share_alone: would match the one column (outside of 0..1: no run can); share_best: of both, by least squares.
    """
    return [record for row in ROWS if not row.setup for record in _dsq(row)]


def _dsq(row: PublishedRow) -> Iterator[Record]:
    stated = (row.arithmetic, row.dram)
    if row.workload == "transformer_iwslt_de_en":
        sixteen = _costs(row, Setup(FixedPoint(16), Precision(16, 16, 16, 16)))
        stated = (sixteen[0] / HEADLINE_ARITHMETIC, sixteen[1] / HEADLINE_DRAM)
    levels = (_costs(row, Setup(_BFP, level)) for level in DSQ_LEVELS)
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


def _costs(row: PublishedRow, setup: Setup) -> tuple[float, float]:
    """(arithmetic, DRAM) of the row's workload."""
    return float(calibrated.arithmetic(setup)), float(calibrated.dram(load_workload(row.workload), setup))


def table_7(hardware: Hardware) -> list[Record]:
    """OPT-1.3B trained in 16-bit floating point: bounds and shares of time; with_adam has the update in "other"."""
    workload = load_workload("opt_1.3b", fused=False)
    step = replace(workload, operations=tuple(op for op in workload.operations if op.name != "optimiser"))
    alone, updated = (evaluate(costed, BF16, hardware).classes for costed in (step, workload))
    records = []
    for cls, floor in alone.items():
        stated, bound = TABLE_7[cls]
        share = _time_share(alone, cls)
        record: Record = {"class": cls, "flop_per_byte": float(floor.intensity), "ridge": float(floor.ridge)}
        record |= {"bound_paper": bound, "bound_ours": "memory" if floor.memory_bound else "compute"}
        record |= {"share_paper": stated, "share_ours": share, "off": (share - stated) / stated}
        records.append(record | {"with_adam": _time_share(updated, cls), "residual": share - stated})
    return records


def _time_share(classes: dict[str, Floor], cls: str) -> float:
    return float(classes[cls].seconds / sum(floor.seconds for floor in classes.values()))
