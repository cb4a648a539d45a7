"""What a run costs by dsq-cost's paper profile: arithmetic and DRAM, fixed-point 32 = 1."""

from analysis.experiments.plan.runs import PlannedRun, rises
from analysis.experiments.training.flags import FLOAT
from costmodel.model.quantisation import Setup
from costmodel.paper import run_cost
from costmodel.paper.run_cost import Cost
from costmodel.workloads.named import load_workload
from dsq import formats
from dsq.precision import parse_levels


def level_costs(run: PlannedRun, workload: str) -> list[Cost]:
    """The cost at each level; none in floating point, which the paper does not cost."""
    if run.levels == FLOAT:
        return []
    kind = formats.format_class(str(run.options["format"]))
    fields = {name: run.options[name] for name in formats.options(kind.name) if name in run.options}
    axis = str(run.options.get("box_axis", "contraction"))
    setups = [Setup(kind(formats.WIDEST, **fields), level, axis) for level in parse_levels(run.levels)]
    return run_cost.level_costs(load_workload(workload), setups)


def expected(run: PlannedRun, workload: str) -> tuple[Cost, ...]:
    """The run's cost; the first and the last level's where plateaus decide; none in floating point."""
    costs = level_costs(run, workload)
    return run_cost.run_cost(costs, rises(run)) if costs else ()
