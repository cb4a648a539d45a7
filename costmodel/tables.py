"""The paper's tables beside ours: every row's published value, computed value and residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel import paper, published
from costmodel.estimate import evaluate
from costmodel.formats import Format, Precision
from costmodel.hardware import Hardware
from costmodel.operations import Operation, Workload
from costmodel.roofline import Floor
from costmodel.workloads import load_workload

TOLERANCE = 0.015


@dataclass(frozen=True)
class Compared:
    """One static row of table 1 or 6; residual = ours - published."""

    row: published.Row
    arithmetic: float
    dram: float

    @property
    def arithmetic_residual(self) -> float:
        return self.arithmetic - self.row.arithmetic

    @property
    def dram_residual(self) -> float:
        return self.dram - self.row.dram

    @property
    def within(self) -> bool:
        return max(abs(self.arithmetic_residual), abs(self.dram_residual)) <= TOLERANCE


@dataclass(frozen=True)
class Fit:
    """A DSQ row explained as a run that did a share of its work at the second level.

    cost(share) = (1 - share) * cost(level 1) + share * cost(level 2), for both columns. `*_share` is the one that
    would match that column alone, outside 0..1 if no schedule of the two levels can; `share` minimises the squared
    residuals of both.
    """

    row: published.Row
    arithmetic_target: float
    dram_target: float
    arithmetic_levels: tuple[float, float]
    dram_levels: tuple[float, float]

    @property
    def arithmetic_share(self) -> float:
        return _share(self.arithmetic_target, self.arithmetic_levels)

    @property
    def dram_share(self) -> float:
        return _share(self.dram_target, self.dram_levels)

    @property
    def share(self) -> float:
        (a0, a1), (d0, d1) = self.arithmetic_levels, self.dram_levels
        slope_a, slope_d = a1 - a0, d1 - d0
        best = (slope_a * (self.arithmetic_target - a0) + slope_d * (self.dram_target - d0)) / (slope_a**2 + slope_d**2)
        return min(1.0, max(0.0, best))

    def at(self, share: float) -> tuple[float, float]:
        """(arithmetic, DRAM) of a run with this share at the second level."""
        (a0, a1), (d0, d1) = self.arithmetic_levels, self.dram_levels
        return (1 - share) * a0 + share * a1, (1 - share) * d0 + share * d1


def _share(target: float, levels: tuple[float, float]) -> float:
    return (target - levels[0]) / (levels[1] - levels[0])


def static_rows(tables: tuple[int, ...] = (1, 6)) -> list[Compared]:
    return [
        Compared(row, float(paper.arithmetic(row.precision, Format(row.kind))), _dram(row, row.precision))
        for row in published.ROWS
        if row.precision is not None and row.table in tables
    ]


def dsq_fits(tables: tuple[int, ...] = (1, 6)) -> list[Fit]:
    """Each DSQ row; IWSLT's against the headline's unrounded figures."""
    found = []
    for row in published.ROWS:
        if row.precision is None and row.table in tables:
            arithmetic_target, dram_target = row.arithmetic, row.dram
            if row.workload == "transformer_iwslt_de_en":
                sixteen = Precision(16, 16, 16, 16)
                arithmetic_target = float(paper.arithmetic(sixteen, Format("fixed"))) / published.HEADLINE_ARITHMETIC
                dram_target = _dram(row, sixteen, "fixed") / published.HEADLINE_DRAM
            first, second = published.DSQ_LEVELS
            levels = tuple(float(paper.arithmetic(level, Format(row.kind))) for level in (first, second))
            drams = (_dram(row, first), _dram(row, second))
            found.append(Fit(row, arithmetic_target, dram_target, (levels[0], levels[1]), drams))
    return found


def _dram(row: published.Row, precision: Precision, kind: str | None = None) -> float:
    return float(paper.dram(load_workload(row.workload), precision, Format(kind or row.kind)))


@dataclass(frozen=True)
class Bound:
    """One column of table 7. Shares are of the step's time floor."""

    cls: str
    share: float  #: linear layers are "fc", the optimiser's update left out
    share_with_update: float  #: the same with Adam's update in "other"
    share_by_module: (
        float  #: with the update, attention's four projections in "attention", the output projection in "other"
    )
    bound: str
    intensity: float
    ridge: float
    published_share: float
    published_bound: str


def table_7(hardware: Hardware) -> list[Bound]:
    """OPT-1.3B trained in 16-bit floating point: bound and share of the time floor of attention, FC layers and the
    rest."""
    workload = load_workload("opt_1.3b")
    step = replace(workload, operations=tuple(op for op in workload.operations if op.name != "optimiser"))
    modules = replace(workload, operations=tuple(replace(op, cls=_module_class(op)) for op in workload.operations))
    found, updated, by_module = (_classes(w, hardware) for w in (step, workload, modules))
    return [
        Bound(
            cls,
            _time_share(found, cls),
            _time_share(updated, cls),
            _time_share(by_module, cls),
            "memory" if floor.memory_bound else "compute",
            float(floor.intensity),
            float(floor.ridge),
            *published.TABLE_7[cls],
        )
        for cls, floor in found.items()
    ]


def _time_share(classes: dict[str, Floor], cls: str) -> float:
    return float(classes[cls].seconds / sum(floor.seconds for floor in classes.values()))


def _classes(workload: Workload, hardware: Hardware) -> dict[str, Floor]:
    return evaluate(workload, Precision(16, 16, 16, 16), Format("float"), hardware).classes


def _module_class(op: Operation) -> str:
    if op.cls != "fc":
        return op.cls
    return "attention" if ".self_attn." in op.name else "other" if op.name == "output_projection" else "fc"
