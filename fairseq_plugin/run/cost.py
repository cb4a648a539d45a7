"""What a run will cost, said before its first update: dsq-cost's paper profile of the model that it trains."""

from operator import attrgetter
from typing import Any

import dsq
from costmodel.cli.format_options import template
from costmodel.model.quantisation import Setup
from costmodel.paper.run_cost import level_costs, run_cost
from costmodel.workloads import workload_file


def predicted(config: dsq.DSQConfig, max_update: int, workload: dict[str, Any]) -> str:
    """The cost of each level and of the run, as a line of the log.

    ``config`` has its rises in updates; ``max_update``: of the run, 0 where epochs alone bound it; ``workload``: as
    ``dsq.workload.trace`` gives it.
    """
    fmt = template(config.format, config.as_dict())
    setups = [Setup(fmt, level, config.box_axis) for level in config.levels]
    of_levels = level_costs(workload_file.parse(workload, "of the run"), setups)
    known = config.rise_at and max_update
    of_run = run_cost(of_levels, [min(rise / max_update, 1.0) for rise in config.rise_at] if known else None)
    lines = []
    for name, cost in (("arithmetic", attrgetter("arithmetic")), ("DRAM", attrgetter("dram"))):
        parts = [f"{cost(of_level):.4f} at {level}" for of_level, level in zip(of_levels, config.levels, strict=True)]
        if len(parts) > 1:
            parts.append(f"{' to '.join(f'{cost(one):.4f}' for one in of_run)} in all")
        lines.append(f"{name} {', '.join(parts)}")
    return "; ".join(lines)
