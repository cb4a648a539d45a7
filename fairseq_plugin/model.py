"""DSQ in a fairseq model: conversion, and what happens when a checkpoint is loaded into it."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

import dsq
from dsq.precision import levels_text
from fairseq_plugin.flags import InputError
from fairseq_plugin.run.state import KEY, NAME, DSQState, check_same

logger = logging.getLogger(__name__)


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
    """The DSQ state of ``model``; None where it has not been converted."""
    return getattr(model, NAME, None)


def _convert(model: nn.Module, config: dsq.DSQConfig) -> None:
    dsq.convert(model, config)
    if not dsq.converted(model):
        raise InputError(
            f"--dsq-exclude {config.exclude!r} leaves no linear to quantise: give another, or no --dsq-levels"
        )
    model.add_module(NAME, DSQState(config))


def _before_load(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object, reset: Callable[[], bool], inference: bool
) -> None:
    saved, state = state_dict.get(prefix + KEY), state_of(model)
    if saved is None or (reset() and not inference):
        if saved is not None:
            logger.info("DSQ leaves the state of a checkpoint of %s: the run is another", _levels(saved))
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
            f"--dsq-levels is absent, but the checkpoint was trained with {_levels(saved)}: give these levels, "
            "another --save-dir, or --dsq-reset to go on in floating point"
        )
    logger.info("DSQ goes on from a checkpoint of %s, trained at level %d", _levels(saved), saved["trained_level"])


def _after_load(model: nn.Module, _: object, inference: bool) -> None:
    state = state_of(model)
    if state is not None:
        dsq.set_level(model, state.config, state.trained_level if inference else state.scheduler.level)


def _levels(saved: dict[str, Any]) -> str:
    return f'--dsq-levels "{levels_text(dsq.DSQConfig.from_dict(saved["config"]).levels)}"'
