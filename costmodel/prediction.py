"""The cost of a training run before it starts: the paper profile of the model that it trains."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from costmodel.model.methods import Setup, template
from costmodel.paper.calibrated import level_costs, shares, weighed
from costmodel.workloads import workload_file
from dsq.arguments import whole_number
from dsq.precision import Precision

#: the fields of the config that are read, but for the format's sizes
_READ = {"levels", "format", "box_axis", "rise_at"}


def predicted(config: Mapping[str, Any], workload: dict[str, Any], total_updates: int = 0) -> str:
    """The cost at each level and of the run, in a line: arithmetic and DRAM, fixed-point 32 = 1.

    Of the run: from the first level's to the last's where plateaus decide, or its length is not known.

    Args:
        config: ``dsq.DSQConfig.as_dict()``.
        workload: a training step, as ``dsq.workload.trace(model, batch)`` gives it.
        total_updates: of the run, which rises in updates are shares of; 0: nothing bounds it.
    Raises:
        ValueError: a config or a workload that cannot be read.
    """
    if not isinstance(config, Mapping) or not _READ.issubset(config):
        raise ValueError(f"config must be a DSQConfig's as_dict(), got {config!r}")
    if not workload_file.is_workload(workload):
        raise ValueError(f"workload must be what dsq.workload.trace gives, got {type(workload)}")
    rises = _shares(config["rise_at"], whole_number("total_updates", total_updates, 0))
    levels, fmt = [Precision(*level) for level in config["levels"]], template(config["format"], config)
    setups = [Setup(fmt, level, config["box_axis"]) for level in levels]
    costs = level_costs(workload_file.parse(workload, "of the run"), setups)
    of_run = [costs[0], costs[-1]] if rises is None else [weighed(costs, shares(rises))]
    lines = []
    for name, cost in (("arithmetic", attrgetter("arithmetic")), ("DRAM", attrgetter("dram"))):
        parts = [f"{cost(of_level):.4f} at {level}" for of_level, level in zip(costs, levels, strict=True)]
        if len(parts) > 1:
            parts.append(f"{' to '.join(f'{cost(one):.4f}' for one in of_run)} in all")
        lines.append(f"{name} {', '.join(parts)}")
    return "; ".join(lines)


def _shares(rises: Sequence[float], total_updates: int) -> list[float] | None:
    """The shares of the run at which the levels but the first begin; None: not known."""
    if not rises or (rises[-1] >= 1 and not total_updates):
        return None
    return [rise if rise < 1 else min(rise / total_updates, 1.0) for rise in rises]
