"""DSQ in a fairseq model: its conversion, the state of the run that it carries, and what a load of a checkpoint does.

The state is a submodule of the model: fairseq restores the model's state on resume, on generation and on fine-tuning,
but never the task's, which it saves too. The state is Python data (get_extra_state): --fp16 would halve buffers.
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

import dsq
from dsq.precision import levels_text, parse_levels
from fairseq_plugin.flags import InputError, flag_of, quiet

logger = logging.getLogger(__name__)

#: the name of the submodule, and of its entry in a state dict
NAME = "dsq"
KEY = f"{NAME}._extra_state"

#: options that a resumed run may change: they say when the next level comes, not what was computed so far
_FREE = {"patience", "threshold", "rise_at", "eval_full_precision"}


class DSQState(nn.Module):
    """The schedule of a run, the work at each level, and every validation loss. No parameters."""

    def __init__(self, config: dsq.DSQConfig) -> None:
        super().__init__()
        self.config = config
        #: as of a run without end, in which no fraction comes to pass, until ``set_total_updates``
        self.scheduler = quiet(config.scheduler, sys.maxsize)
        self.trained_level = 0  #: the level of the last update: a checkpoint may already hold the next update's
        self.validations: list[dict[str, Any]] = []  #: update, level and loss of each validation

    def set_total_updates(self, total: int) -> None:
        """Turn rises in fractions of the run into updates. ``total``: of the run with DSQ; 0: nothing bounds it.

        Raises InputError for fractions of a run that nothing bounds.
        """
        if not any(moment < 1 for moment in self.config.rise_at):
            return
        if not total:
            moments = ", ".join(map(str, self.config.rise_at))
            raise InputError(
                f"--dsq-rise-at {moments}: must be updates where --max-update and --max-epoch are absent; "
                "with data in several folders, whose epochs differ, give --max-update"
            )
        self.scheduler.rise_at = quiet(self.config.scheduler, total).rise_at
        self.config = quiet(dataclasses.replace, self.config, rise_at=self.scheduler.rise_at)

    def record(self, tokens: int) -> bool:
        """Take note of one update; True if the level rises with it."""
        self.trained_level = self.scheduler.level
        return self.scheduler.record(1, tokens)

    def validated(self, update: int, loss: float) -> bool:
        """Take note of a validation loss; True if the level rose."""
        self.validations.append({"update": update, "level": self.scheduler.level, "loss": loss})
        return self.scheduler.step(loss)

    def __deepcopy__(self, memo: object) -> nn.Module:
        """Nothing: fairseq's running mean of the weights (--store-ema) takes all of a copy's state for tensors."""
        return nn.Module()

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "scheduler": self.scheduler.state_dict(),
            "trained_level": self.trained_level,
            "validations": list(self.validations),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.trained_level = state["trained_level"]
        self.validations = list(state["validations"])


def check_same(config: dsq.DSQConfig, saved: dict[str, Any]) -> None:
    """Raises InputError where a run with ``config`` cannot go on from a checkpoint whose config is ``saved``."""
    theirs = dsq.DSQConfig.from_dict(saved).as_dict()
    for name, value in config.as_dict().items():
        if name not in _FREE and value != theirs[name]:
            raise InputError(
                f"{flag_of(name)} {_shown(value)} differs from the checkpoint's {_shown(theirs[name])}: "
                "give the checkpoint's, another --save-dir, or --dsq-reset to begin with them anew"
            )


def _shown(value: Any) -> str:
    return f'"{levels_text(parse_levels(value))}"' if isinstance(value, list) else repr(value)


def prepare(
    model: nn.Module, config: dsq.DSQConfig | None, *, reset: Callable[[], bool], inference: bool = False
) -> None:
    """Convert ``model`` in place if there is a ``config``, and make it ready for checkpoints with and without DSQ.

    Args:
        reset: asked at each load of a training: whether to leave what a checkpoint says of DSQ.
        inference: the model is built for a checkpoint (generation): without ``config`` it becomes what that holds.
    """
    if config is not None:
        _convert(model, config)
    model.register_load_state_dict_pre_hook(functools.partial(_before_load, reset=reset, inference=inference))
    model.register_load_state_dict_post_hook(functools.partial(_after_load, inference=inference))


def state_of(model: nn.Module) -> DSQState | None:
    """The DSQ state of ``model``; None where it has not been converted, and of a copy."""
    state = getattr(model, NAME, None)
    return state if isinstance(state, DSQState) else None


def _convert(model: nn.Module, config: dsq.DSQConfig) -> None:
    dsq.convert(model, config)
    if not dsq.converted(model):
        raise InputError(
            f"--dsq-exclude {config.exclude!r} leaves no linear to quantize: give another, or no --dsq-levels"
        )
    model.add_module(NAME, DSQState(config))


def _before_load(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object, reset: Callable[[], bool], inference: bool
) -> None:
    saved, state = state_dict.get(prefix + KEY), state_of(model)
    if saved is None or (reset() and not inference):
        if saved is not None:
            logger.info("DSQ leaves the state of a checkpoint of %s: the run is another", _levels_of(saved))
            del state_dict[prefix + KEY]
        if state is not None:
            state_dict[prefix + KEY] = state.get_extra_state()
        return
    if state is not None:
        check_same(state.config, saved["config"])
    elif inference:
        _convert(model, dsq.DSQConfig.from_dict(saved["config"]))
    else:
        raise InputError(
            f"--dsq-levels is absent, but the checkpoint was trained with {_levels_of(saved)}: give these levels, "
            "another --save-dir, or --dsq-reset to go on in floating point"
        )
    logger.info("DSQ goes on from a checkpoint of %s, trained at level %d", _levels_of(saved), saved["trained_level"])


def _after_load(model: nn.Module, _: object, inference: bool) -> None:
    state = state_of(model)
    if state is not None:
        dsq.set_level(model, state.config, state.trained_level if inference else state.scheduler.level)


def _levels_of(saved: dict[str, Any]) -> str:
    return f'--dsq-levels "{levels_text(dsq.DSQConfig.from_dict(saved["config"]).levels)}"'


def total_updates(optimization: Any, batches: int) -> int:
    """The updates after which --max-update or --max-epoch ends a run, whichever is first; 0 where neither is given.

    optimization: fairseq's config of that name. batches: of an epoch, of one worker; every epoch has as many. 0: they
    differ (data in several folders), and no number of epochs is a number of updates. Updates that a worker skips (an
    overflow of --fp16) make the run shorter by as many, where epochs end it.
    """
    each = [batches // n if optimization.skip_remainder_batch else -(-batches // n) for n in optimization.update_freq]
    epochs = int(optimization.max_epoch or 0)
    by_epochs = sum(each[:epochs]) + max(epochs - len(each), 0) * each[-1]
    return min(filter(None, (int(optimization.max_update or 0), by_epochs)), default=0)
