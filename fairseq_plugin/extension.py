"""Add DSQ to fairseq's tasks, parsers, checkpoints and trainer.

Subclasses replace the tasks in fairseq's registry under their own names: ``--task translation`` works as before, and
takes the --dsq-* flags too.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.file_io import PathManager
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.trainer import Trainer
from fairseq_cli import train
from hydra.core.config_store import ConfigStore

from dsq.scheduler import updates_left
from fairseq_plugin import checkpoints
from fairseq_plugin.flags import DSQFlags, add_flags
from fairseq_plugin.state import total_updates
from fairseq_plugin.tasks import DSQTask, write_history

logger = logging.getLogger(__name__)


def extend_fairseq() -> None:
    """Add DSQ to all of fairseq's tasks, its training parser and its trainer."""
    for name in list(TASK_REGISTRY):
        _extend_task(name)
    options.add_model_args = _and_then(options.add_model_args, lambda group, parser: add_flags(parser))
    train.train = _up_to_max_update(train.train)
    checkpoint_utils.verify_checkpoint_directory = checkpoints.make_folder
    checkpoint_utils.load_checkpoint_to_cpu = checkpoints.checked(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.torch_persistent_save = checkpoints.save
    PathManager.copy = staticmethod(checkpoints.copy)
    checkpoint_utils.load_checkpoint = _and_then(checkpoint_utils.load_checkpoint, _begin)
    Trainer.load_checkpoint = _anew_where_fairseq_is(Trainer.load_checkpoint)
    Trainer.save_checkpoint = _and_then(Trainer.save_checkpoint, _write_history_too)


def _extend_task(name: str) -> None:
    task = TASK_REGISTRY[name]
    extended = type(f"DSQ{task.__name__}", (DSQTask, task), {"__module__": DSQTask.__module__})
    if name in TASK_DATACLASS_REGISTRY:
        options_class = TASK_DATACLASS_REGISTRY[name]
        with_flags = dataclasses.make_dataclass(f"DSQ{options_class.__name__}", [], bases=(DSQFlags, options_class))
        TASK_DATACLASS_REGISTRY[name] = with_flags
        setattr(extended, "__dataclass", with_flags)
        node = with_flags()
        node._name = name
        ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")
    TASK_REGISTRY[name] = extended


def _up_to_max_update(train_epoch: Callable) -> Callable:
    """Return ``train_epoch``, which here does nothing after the last update; fairseq's makes one more."""

    @functools.wraps(train_epoch)
    def up_to(cfg: Any, trainer: Trainer, *args: Any) -> Any:
        if 0 < cfg.optimization.max_update <= trainer.get_num_updates():
            logger.info("the run had made its %d updates", trainer.get_num_updates())
            return [None], True
        return train_epoch(cfg, trainer, *args)

    return up_to


def _anew_where_fairseq_is(load_checkpoint: Callable) -> Callable:
    """Return ``load_checkpoint``, which here resets DSQ if updates count from 0: fine-tuning, --reset-optimizer."""

    @functools.wraps(load_checkpoint)
    def load(trainer: Trainer, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        trainer.task.dsq_reset = reset_optimizer or getattr(trainer.task, "dsq_reset", False)
        return load_checkpoint(trainer, filename, reset_optimizer, *args, **kwargs)

    return load


def _begin(loaded: tuple[Any, Any], cfg: Any, trainer: Trainer) -> None:
    """Set the length of the run, once fairseq has its batches; ``loaded`` is the result of ``load_checkpoint``."""
    state = getattr(trainer.task, "dsq_state", None)
    if state is not None:
        _, epochs = loaded
        task = trainer.task
        batches = 0 if task.has_sharded_data("train") else len(epochs)
        total, before = total_updates(trainer.cfg.optimization, batches), trainer.get_num_updates()
        task.dsq_updates = updates_left(total, before - state.scheduler.updates) or 0
        state.set_total_updates(task.dsq_updates)


def _write_history_too(_: None, trainer: Trainer, *args: object) -> None:
    state = getattr(trainer.task, "dsq_state", None)
    if state is not None:
        write_history(state, trainer.cfg.checkpoint.save_dir)


def _and_then(function: Callable, action: Callable) -> Callable:
    """Return a function that calls ``function``, and then ``action`` with its result and the same arguments."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        action(result, *args)
        return result

    return both
