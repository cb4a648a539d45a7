"""DSQ in a fairseq model: conversion, and what happens when a checkpoint is loaded into it."""

import functools
import logging
from typing import Any

from torch import nn

import dsq
from dsq.precision import levels_text
from fairseq_plugin.flags import InputError
from fairseq_plugin.run.state import KEY, NAME, DSQState, check_same

logger = logging.getLogger(__name__)


def prepare(model: nn.Module, config: dsq.DSQConfig | None, *, reset: bool = False, inference: bool = False) -> None:
    """Convert ``model`` in place if there is a ``config``, and make it ready for checkpoints with and without DSQ.

    Args:
        reset: start at the first level whatever a checkpoint says.
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
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object, reset: bool, inference: bool
) -> None:
    saved, state = state_dict.get(prefix + KEY), state_of(model)
    if saved is None or (state is not None and reset):  # fairseq loads into copies of the model too (--store-ema)
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
            "or another --save-dir"
        )
    logger.info("DSQ goes on from a checkpoint of %s, trained at level %d", _levels(saved), saved["trained_level"])


def _after_load(model: nn.Module, _: object, inference: bool) -> None:
    state = state_of(model)
    if state is not None:
        dsq.set_level(model, state.config, state.trained_level if inference else state.scheduler.level)


def _levels(saved: dict[str, Any]) -> str:
    return f'--dsq-levels "{levels_text(dsq.DSQConfig.from_dict(saved["config"]).levels)}"'
