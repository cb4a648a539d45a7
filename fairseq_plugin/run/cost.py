"""What a run will cost, said before its first update: dsq-cost's paper profile of the model that it trains."""

from collections.abc import Sequence
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
    levels = level_costs(workload_file.parse(workload, "of the run"), setups)
    known = config.rise_at and max_update
    run = run_cost(levels, [min(rise / max_update, 1.0) for rise in config.rise_at] if known else None)
    return "; ".join(
        f"{shown} {_shown(setups, [getattr(c, name) for c in levels], [getattr(c, name) for c in run])}"
        for name, shown in (("arithmetic", "arithmetic"), ("dram", "DRAM"))
    )


def _shown(setups: Sequence[Setup], levels: Sequence[float], run: Sequence[float]) -> str:
    each = [f"{cost:.4f} at {setup.precision}" for setup, cost in zip(setups, levels, strict=True)]
    return ", ".join(each + [f"{' to '.join(f'{cost:.4f}' for cost in run)} in all"] * (len(levels) > 1))
