"""The paper's tables beside ours: every row's published value, computed value and residual."""

from dataclasses import dataclass, replace

from costmodel.hardware.hardware import Hardware
from costmodel.model.estimate import evaluate
from costmodel.model.quantisation import BF16, Setup
from costmodel.model.roofline import Floor
from costmodel.paper import calibrated, published
from costmodel.workloads.named import load_workload
from dsq.formats import FixedPoint
from dsq.precision import Precision


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
    def arithmetic_relative(self) -> float:
        """Residual as a share of the published figure."""
        return self.arithmetic_residual / self.row.arithmetic

    @property
    def dram_relative(self) -> float:
        return self.dram_residual / self.row.dram

    @property
    def arithmetic_role(self) -> str:
        """The constant of the model that was chosen by this figure; "test" where none was."""
        return calibrated.FITTED_ARITHMETIC.get(str(self.row.setup), "test")

    @property
    def dram_role(self) -> str:
        return calibrated.FITTED_DRAM.get(str(self.row.setup), "test")


@dataclass(frozen=True)
class FitColumn:
    """One published figure of a DSQ row, and what runs wholly at the first or the second level cost."""

    published: float
    first: float
    second: float

    def at(self, share: float) -> float:
        """Cost of a run with this share of its work at the second level."""
        return (1 - share) * self.first + share * self.second

    @property
    def share(self) -> float:
        """The one that would match; outside 0..1 if no schedule of the two levels can."""
        return (self.published - self.first) / (self.second - self.first)


@dataclass(frozen=True)
class Fit:
    """A DSQ row explained as a run that did a share of its work at the second level."""

    row: published.Row
    arithmetic: FitColumn
    dram: FitColumn

    @property
    def share(self) -> float:
        """The one in 0..1 that minimises the squared residuals of both columns."""
        columns = (self.arithmetic, self.dram)
        slopes = [column.second - column.first for column in columns]
        best = sum(slope * (column.published - column.first) for slope, column in zip(slopes, columns, strict=True))
        return min(1.0, max(0.0, best / sum(slope**2 for slope in slopes)))


def static_rows(tables: tuple[int, ...] = (1, 6)) -> list[Compared]:
    rows = (row for row in published.ROWS if row.precision is not None and row.table in tables)
    return [Compared(row, *_costs(row, row.setup)) for row in rows]


def dsq_fits(tables: tuple[int, ...] = (1, 6)) -> list[Fit]:
    """Each DSQ row; IWSLT's against the headline's unrounded figures."""
    fits = []
    for row in published.ROWS:
        if row.precision is not None or row.table not in tables:
            continue
        target = (row.arithmetic, row.dram)
        if row.workload == "transformer_iwslt_de_en":
            sixteen = _costs(row, Setup(FixedPoint(16), Precision(16, 16, 16, 16)))
            target = (sixteen[0] / published.HEADLINE_ARITHMETIC, sixteen[1] / published.HEADLINE_DRAM)
        levels = (_costs(row, Setup(row.format, level)) for level in published.DSQ_LEVELS)
        arithmetic, dram = (FitColumn(*column) for column in zip(target, *levels, strict=True))
        fits.append(Fit(row, arithmetic, dram))
    return fits


def _costs(row: published.Row, setup: Setup) -> tuple[float, float]:
    """(arithmetic, DRAM) of the row's workload."""
    return float(calibrated.arithmetic(setup)), float(calibrated.dram(load_workload(row.workload), setup))


@dataclass(frozen=True)
class Bound:
    """One column of table 7. Shares are of the step's time floor."""

    cls: str
    share: float  #: linear layers are "fc", the optimiser's update left out
    share_with_update: float  #: the same with Adam's update in "other"
    bound: str
    intensity: float
    ridge: float
    published_share: float
    published_bound: str

    @property
    def residual(self) -> float:
        return self.share - self.published_share

    @property
    def relative(self) -> float:
        """Residual as a share of the published figure."""
        return self.residual / self.published_share


def table_7(hardware: Hardware) -> list[Bound]:
    """OPT-1.3B trained in 16-bit floating point: bound and share of the time floor of attention, FC layers and the
    rest."""
    workload = load_workload("opt_1.3b", fused=False)
    step = replace(workload, operations=tuple(op for op in workload.operations if op.name != "optimiser"))
    alone, updated = (evaluate(costed, BF16, hardware).classes for costed in (step, workload))
    return [
        Bound(
            cls,
            _time_share(alone, cls),
            _time_share(updated, cls),
            "memory" if floor.memory_bound else "compute",
            float(floor.intensity),
            float(floor.ridge),
            *published.TABLE_7[cls],
        )
        for cls, floor in alone.items()
    ]


def _time_share(classes: dict[str, Floor], cls: str) -> float:
    return float(classes[cls].seconds / sum(floor.seconds for floor in classes.values()))
