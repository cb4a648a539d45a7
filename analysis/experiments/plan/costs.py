"""What a run costs by dsq-cost's paper profile: arithmetic and DRAM, fixed-point 32 = 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from analysis.experiments.plan.runs import PlannedRun, rises
from analysis.experiments.training.flags import FLOAT
from costmodel.model.quantisation import Setup
from costmodel.paper import calibrated
from costmodel.workloads.named import load_workload
from dsq import formats
from dsq.precision import parse_levels


@dataclass(frozen=True)
class Cost:
    arithmetic: float
    dram: float


def level_costs(run: PlannedRun, workload: str) -> list[Cost]:
    """The cost at each level; none in floating point, which the paper does not cost."""
    if run.levels == FLOAT:
        return []
    kind = formats.format_class(str(run.options["format"]))
    fields = {name: run.options[name] for name in formats.options(kind.name) if name in run.options}
    axis = str(run.options.get("box_axis", "contraction"))
    shapes = load_workload(workload)
    setups = [Setup(kind(formats.WIDEST, **fields), level, axis) for level in parse_levels(run.levels)]
    return [Cost(float(calibrated.arithmetic(s)), float(calibrated.dram(shapes, s))) for s in setups]


def weighed(costs: Sequence[Cost], shares: Sequence[float]) -> Cost | None:
    """The mean of the levels' costs by their shares of the work; None in floating point."""
    if not costs:
        return None
    whole = sum(shares)
    pairs = list(zip(costs, shares, strict=True))
    return Cost(*(sum(getattr(c, name) * share for c, share in pairs) / whole for name in ("arithmetic", "dram")))


def expected(run: PlannedRun, workload: str) -> Cost | tuple[Cost, Cost] | None:
    """The run's cost; the first and the last level's where plateaus decide; None in floating point."""
    costs = level_costs(run, workload)
    moments = rises(run)
    if not costs:
        return None
    if moments is None:
        return costs[0], costs[-1]
    return weighed(costs, [after - before for before, after in pairwise([0.0, *moments, 1.0])])
