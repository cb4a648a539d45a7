"""Where a run stands, for loops that write their own checkpoints: the level beside the weights.

    torch.save({"model": model.state_dict(), "dsq": dsq.state_dict(config, scheduler)}, path)
    config, scheduler = dsq.load_state_dict(model, torch.load(path)["dsq"])

The state is plain data, which JSON takes too.
"""

from typing import Any

from torch import nn

from dsq.config import DSQConfig
from dsq.conversion import convert, converted, set_level
from dsq.scheduler import PrecisionScheduler

_KEYS = {"config", "scheduler"}


def state_dict(config: DSQConfig, scheduler: PrecisionScheduler) -> dict[str, Any]:
    """The config and where its schedule stands. Raises TypeError where they are something else."""
    if not isinstance(config, DSQConfig) or not isinstance(scheduler, PrecisionScheduler):
        raise TypeError(f"state_dict takes a DSQConfig and its scheduler, got {type(config)} and {type(scheduler)}")
    return {"config": config.as_dict(), "scheduler": scheduler.state_dict()}


def load_state_dict(
    model: nn.Module, state: dict[str, Any], total_updates: int | None = None
) -> tuple[DSQConfig, PrecisionScheduler]:
    """Put ``model`` to the level of ``state``, converting it if it is not, and give the config and its scheduler.

    ``total_updates``: of the run, where ``rise_at`` has fractions. Raises ValueError where ``state`` is none that
    ``dsq.state_dict`` gave.
    """
    if not isinstance(state, dict) or set(state) != _KEYS:
        got = sorted(state) if isinstance(state, dict) else repr(state)
        raise ValueError(f"state must have the keys {sorted(_KEYS)}, as dsq.state_dict gives it, got {got}")
    config = DSQConfig.from_dict(state["config"])
    scheduler = config.scheduler(total_updates)
    scheduler.load_state_dict(state["scheduler"])
    if not converted(model):
        convert(model, config)
    set_level(model, config, scheduler.level)
    return config, scheduler
