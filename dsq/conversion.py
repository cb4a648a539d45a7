"""Let a model that nobody rewrote train with DSQ."""

import re
import warnings
from typing import TypeVar

from torch import nn

from dsq import stash
from dsq.arguments import whole_number
from dsq.config import DSQConfig
from dsq.linear import Linear

Model = TypeVar("Model", bound=nn.Module)


def convert(model: Model, config: DSQConfig | None = None) -> Model:
    """Turn every ``nn.Linear`` of ``model`` into a ``dsq.Linear`` at the first level of ``config``, in place.

    Only the class of a module changes: names, parameters, tying, initialisation and state dict stay. Modules whose
    name matches ``config.exclude`` and subclasses of nn.Linear are left alone. Warns where nothing was converted, or
    ``config.exclude`` matches nothing that would have been. With ``config.stash`` "all" dsq.stash's policy "bfp" is
    applied too.

    Returns ``model``. Raises TypeError where ``model`` is no module or ``config`` no DSQConfig, ValueError where the
    model has been converted before.
    """
    config = DSQConfig() if config is None else config
    _check_types("convert", model, config)
    if converted(model):
        raise ValueError("model has been converted before; use dsq.set_level to change its precision")
    excluded = 0
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            if config.exclude is not None and re.search(config.exclude, name):
                excluded += 1
            else:
                module.__class__ = Linear
        elif isinstance(module, nn.TransformerEncoderLayer):
            # its fused evaluation path reads the weights and never calls the Linears
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # they are for that path alone
    for linear in converted(model).values():
        linear.eval_full_precision = config.eval_full_precision
    if converted(model):
        set_level(model, config, 0)
        if config.stash == "all":
            stash.apply(model, "bfp")  # at the q1 of the layers, whatever their level
    else:
        warnings.warn("model has no nn.Linear to convert: it stays as it is", stacklevel=2)
    if config.exclude is not None and not excluded:
        warnings.warn(f"exclude={config.exclude!r} matches no nn.Linear of the model", stacklevel=2)
    return model


def converted(model: nn.Module) -> dict[str, Linear]:
    """The converted layers of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def set_level(model: nn.Module, config: DSQConfig, level: int) -> None:
    """Set every converted layer of ``model`` to the precision of ``config.levels[level]``.

    Raises TypeError where ``model`` is no module or ``config`` no DSQConfig, ValueError for a level that the config
    has not, or a model without converted layers.
    """
    _check_types("set_level", model, config)
    level = whole_number("level", level, 0, len(config.levels) - 1)
    layers = converted(model)
    if not layers:
        raise ValueError("model has no converted layers; dsq.convert converts them")
    quantizers = config.at(level)
    for module in layers.values():
        module.quantizers = quantizers


def _check_types(function: str, model: nn.Module, config: DSQConfig) -> None:
    if not isinstance(model, nn.Module) or not isinstance(config, DSQConfig):
        raise TypeError(f"{function} takes a torch.nn.Module and a DSQConfig, got {type(model)} and {type(config)}")
