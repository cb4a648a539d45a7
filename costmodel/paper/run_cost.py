"""Costs of a run of several levels by the paper profile: arithmetic and DRAM, fixed-point 32 = 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup
from costmodel.paper import calibrated


@dataclass(frozen=True)
class Cost:
    arithmetic: float
    dram: float


def level_costs(workload: Workload, setups: Sequence[Setup]) -> list[Cost]:
    """The cost at each level."""
    return [Cost(float(calibrated.arithmetic(s)), float(calibrated.dram(workload, s))) for s in setups]


def weighed(costs: Sequence[Cost], shares: Sequence[float]) -> Cost:
    """The mean of the levels' costs by their shares of the work."""
    whole = sum(shares)
    pairs = list(zip(costs, shares, strict=True))
    return Cost(*(sum(getattr(c, name) * share for c, share in pairs) / whole for name in ("arithmetic", "dram")))


def shares(rises: Sequence[float]) -> list[float]:
    """Each level's share of a run whose levels but the first begin at these shares of it."""
    return [after - before for before, after in pairwise((0.0, *rises, 1.0))]


def run_cost(costs: Sequence[Cost], rises: Sequence[float] | None) -> tuple[Cost, ...]:
    """The cost of a run whose levels but the first begin at these shares of it; the first level's and the last's,
    between which it lies, where plateaus decide (None)."""
    if len(costs) == 1:
        return (costs[0],)
    return (costs[0], costs[-1]) if rises is None else (weighed(costs, shares(rises)),)
