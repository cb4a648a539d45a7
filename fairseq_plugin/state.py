"""Convert a fairseq model, hold the state of its run, and check that state when a checkpoint is loaded.

The state is a submodule of the model, because fairseq restores the model's state on resume, generation and fine-tuning,
but never the task's. The state is Python data (get_extra_state), because --fp16 would halve buffers.
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn

import dsq
from dsq.layers.own_products import set_watches, watches
from dsq.precision import levels_text, parse_levels
from fairseq_plugin.flags import InputError, flag_of, quiet

logger = logging.getLogger(__name__)

#: the name of the submodule, and of its entry in a state dict
NAME = "dsq"
KEY = f"{NAME}._extra_state"

#: options that a resumed run may change: they do not affect the updates so far
_FREE = {"patience", "threshold", "rise_at", "eval_full_precision"}


class DSQState(nn.Module):
    """The schedule of a run, the work at each level, and every validation loss. No parameters."""

    def __init__(self, config: dsq.DSQConfig, model: nn.Module) -> None:
        super().__init__()
        self.config = config
        self._model: ref[nn.Module] | None = ref(model)
        #: until ``set_total_updates``, of a run without end, which reaches no fraction
        self.scheduler = quiet(config.scheduler, sys.maxsize)
        self.trained_level = 0  #: the level of the last update: a checkpoint may already hold the next update's
        self.validations: list[dict[str, Any]] = []  #: update, level and loss of each validation

    def set_total_updates(self, total: int) -> None:
        """Convert ``rise_at`` in fractions of the run into updates. ``total``: updates with DSQ; 0: unbounded.

        Raises InputError for fractions of an unbounded run.
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
        """Record one update. Return whether the level rose."""
        self.trained_level = self.scheduler.level
        return self.scheduler.record(1, tokens)

    def validated(self, update: int, loss: float) -> bool:
        """Record a validation loss. Return whether the level rose."""
        self.validations.append({"update": update, "level": self.scheduler.level, "loss": loss})
        return self.scheduler.step(loss)

    def __deepcopy__(self, memo: object) -> nn.Module:
        """Return an empty module: fairseq's running mean of weights (--store-ema) needs tensors alone in a copy."""
        return nn.Module()

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "scheduler": self.scheduler.state_dict(),
            "trained_level": self.trained_level,
            "validations": list(self.validations),
            "own_products": watches(self._watched()),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.trained_level = state["trained_level"]
        self.validations = list(state["validations"])
        set_watches(self._watched(), state.get("own_products", {}))

    def _watched(self) -> nn.Module:
        return (self._model and self._model()) or self  # which has no modules with matrices

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # a copy is of no model, and a reference is not pickled


def check_same(config: dsq.DSQConfig, saved: dict[str, Any]) -> None:
    """Raise InputError if a run with ``config`` cannot resume from a checkpoint whose config is ``saved``."""
    checkpoint = _config_of(saved).as_dict()
    for name, value in config.as_dict().items():
        if name not in _FREE and value != checkpoint[name]:
            raise InputError(
                f"{flag_of(name)} {_shown(value)} differs from the checkpoint's {_shown(checkpoint[name])}: "
                "give the checkpoint's, another --save-dir, or --dsq-reset to begin with them anew"
            )


def _shown(value: Any) -> str:
    return f'"{levels_text(parse_levels(value))}"' if isinstance(value, list) else repr(value)


def prepare(
    model: nn.Module, config: dsq.DSQConfig | None, *, reset: Callable[[], bool], inference: bool = False
) -> None:
    """Convert ``model`` in place if there is a ``config``, and prepare it for checkpoints with and without DSQ.

    Args:
        reset: called at each load in training: whether to ignore the checkpoint's DSQ state.
        inference: the model is built for a checkpoint (generation), whose config it takes if ``config`` is None.
    """
    if config is not None:
        _convert(model, config)
    model.register_load_state_dict_pre_hook(functools.partial(_before_load, reset=reset, inference=inference))
    model.register_load_state_dict_post_hook(functools.partial(_after_load, inference=inference))


def state_of(model: nn.Module) -> DSQState | None:
    """Return the DSQ state of ``model``; None if it is not converted, or a copy."""
    state = getattr(model, NAME, None)
    return state if isinstance(state, DSQState) else None


def _convert(model: nn.Module, config: dsq.DSQConfig) -> None:
    dsq.convert(model, config)
    if not dsq.converted(model):
        raise InputError(
            f"--dsq-exclude {config.exclude!r} leaves no linear to quantize: give another, or no --dsq-levels"
        )
    model.add_module(NAME, DSQState(config, model))


def _before_load(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object, reset: Callable[[], bool], inference: bool
) -> None:
    saved, state = state_dict.get(prefix + KEY), state_of(model)
    if saved is None or (reset() and not inference):
        if saved is not None:
            logger.info("DSQ ignores the state of a checkpoint of %s: this is a new run", _levels_of(saved["config"]))
            del state_dict[prefix + KEY]
        if state is not None:
            state_dict[prefix + KEY] = state.get_extra_state()
        return
    if state is not None:
        check_same(state.config, saved["config"])
    elif inference:
        _convert(model, _config_of(saved["config"]))
    else:
        raise InputError(
            f"--dsq-levels is absent, but the checkpoint was trained with {_levels_of(saved['config'])}: give these "
            "levels, another --save-dir, or --dsq-reset to continue in floating point"
        )
    levels = _levels_of(saved["config"])
    logger.info("DSQ goes on from a checkpoint of %s, trained at level %d", levels, saved["trained_level"])


def _after_load(model: nn.Module, _: object, inference: bool) -> None:
    state = state_of(model)
    if state is not None:
        dsq.set_level(model, state.config, state.trained_level if inference else state.scheduler.level)


def _levels_of(config: dict[str, Any]) -> str:
    """Return the flag that gives the levels of a saved config, which may name formats that are not registered here."""
    levels = (level if isinstance(level, str) else f"[{','.join(map(str, level))}]" for level in config["levels"])
    return f'--dsq-levels "{" ".join(levels)}"'


def _config_of(saved: dict[str, Any]) -> dsq.DSQConfig:
    """Return the config of a checkpoint. Raises InputError if this process lacks its formats."""
    try:
        return dsq.DSQConfig.from_dict(saved)
    except ValueError as error:
        text = f"the checkpoint was trained with {_levels_of(saved)}"
        if str(error).startswith("format must be"):
            text += ": give the --user-dir that registers its formats"
        raise InputError(f"{text}; {error}") from error


def total_updates(optimization: Any, batches: int) -> int:
    """Return the updates after which --max-update or --max-epoch ends a run; 0 if neither is given.

    Updates that a worker skips (an overflow of --fp16) shorten a run that epochs end.

    Args:
        optimization: fairseq's config of that name.
        batches: of an epoch, of one worker; all epochs have as many. 0: they differ (data in several folders), and
            epochs cannot be converted into updates.
    """
    updates = [
        batches // n if optimization.skip_remainder_batch else -(-batches // n) for n in optimization.update_freq
    ]
    epochs = int(optimization.max_epoch or 0)
    by_epochs = sum(updates[:epochs]) + max(epochs - len(updates), 0) * updates[-1]
    return min(filter(None, (int(optimization.max_update or 0), by_epochs)), default=0)
