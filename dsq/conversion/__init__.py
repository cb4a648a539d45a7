"""Let a model that nobody rewrote train with DSQ.

classes.py          which modules become quantised
replacement.py      a layer put in the place of a converted one later
module_settings.py  what else is changed of a module, and what it was
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from dsq.arguments import whole_number
from dsq.config import DSQConfig
from dsq.conversion.classes import change_classes, quantise_attention, quantised_class
from dsq.conversion.module_settings import change, changes, set_class, undo_changes
from dsq.conversion.replacement import FIELDS, take_fields
from dsq.layers.unquantised import quantised_parameters, unquantised
from dsq.process_memory import give_memory_back
from dsq.quantizers import Quantised

__all__ = ["as_plain", "check_conversion", "convert", "converted", "quantised_class", "set_level", "unconvert"]

Model = TypeVar("Model", bound=nn.Module)

#: fields of DSQConfig that it alone acts on
_OF_CONVERSION = ("exclude", "tied", "stash", "attention", "adapters", "eval_full_precision")


def convert(model: Model, config: DSQConfig | None = None) -> Model:
    """Turn the linear layers of ``model`` into quantised ones at the first level of ``config``, in place.

    nn.Linear becomes dsq.Linear; nn.MultiheadAttention, convolutions that cut patches, and transformers' Conv1D and
    experts become their quantised selves. Only the class of a module changes: names, parameters, tying, initialisation
    and state dict stay. Modules whose name matches ``config.exclude``, those whose weight is an embedding's too (unless
    ``config.tied``), subclasses of PyTorch's layers and of Conv1D, and PEFT's adapters are left alone. Fused paths that
    would read the weights past the layers are switched off. Warns where nothing was converted, where under half of the
    parameters that are multiplied were (``dsq.report`` says what was left, and why), or where ``config.exclude``
    matches nothing that would have been. With ``config.stash`` "all" dsq.stash's policy "bfp" is applied too, and
    ``dsq.give_memory_back`` is called.

    A plain layer that is put in the place of a converted one later, as ``resize_token_embeddings`` of transformers puts
    an output projection, is converted as that was.

    Returns ``model``. Raises TypeError where ``model`` is no module or ``config`` no DSQConfig, ValueError where the
    model has been converted before.
    """
    config = DSQConfig() if config is None else config
    _check_types("convert", model, config)
    if converted(model):
        known = "use dsq.set_level to change its precision, or dsq.unconvert first"
        raise ValueError(f"model has been converted before; {known}")
    if config.stash == "all":
        give_memory_back()
    excluded, tied = change_classes(model, config)
    for layer in converted(model).values():
        layer.eval_full_precision = config.eval_full_precision
        layer.conversion = {name: getattr(config, name) for name in _OF_CONVERSION}
    if converted(model):
        set_level(model, config, 0)
        if config.attention:
            quantise_attention(model)
        if config.stash == "all":
            _pack_whole_stash(model)
        _warn_of_little(model, excluded + tied)
    else:
        warnings.warn("model has no nn.Linear to convert: it stays as it is", stacklevel=2)
    if config.exclude is not None and not excluded:
        warnings.warn(f"exclude={config.exclude!r} matches no nn.Linear of the model", stacklevel=2)
    return model


def unconvert(model: Model) -> Model:
    """Give every converted layer of ``model`` the class that it had, in place, and take away what ``convert`` added.

    Parameters stay as they are. Stash policies applied by hand stay too. Returns ``model``. Raises TypeError where it
    is no module, ValueError where it has no converted layers.
    """
    layers = converted(model)
    if not layers:
        raise ValueError("model has no converted layers: there is nothing to take back")
    for layer in layers.values():
        for name in FIELDS:
            layer.__dict__.pop(name, None)
        set_class(layer, layer.plain)
    changed: list[Any] = list(model.modules())
    for module in changed:
        undo_changes(module)
    return model


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """``model`` as it was before conversion, while inside."""
    layers = converted(model).values()
    if not layers:
        yield
        return
    own = [(layer, type(layer), layer.__dict__.copy()) for layer in layers]
    settings = [(module, changes(module)) for module in model.modules()]
    unconvert(model)
    try:
        yield
    finally:
        for layer, kind, fields in own:
            layer.__class__ = kind
            take_fields(layer, fields)
        for module, changed in settings:
            for name, value in changed.items():
                change(module, name, value)


def converted(model: nn.Module) -> dict[str, Any]:
    """The converted layers of ``model`` by name: each has ``quantizers``. Raises TypeError where it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantised)}


def check_conversion(model: nn.Module, config: DSQConfig, of: str = "config") -> None:
    """Raise ValueError where ``model`` was converted by a config that differs in what ``convert`` alone acts on."""
    for layer in converted(model).values():
        for name, value in layer.conversion.items():
            if getattr(config, name) != value:
                got = getattr(config, name)
                raise ValueError(f"{of} must have {name}={value!r}, as the model was converted, got {got!r}")


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


def _pack_whole_stash(model: nn.Module) -> None:
    """Keep all that autograd saves at the q1 of the layers, whatever their level."""
    try:
        change(model, "stash", True)
    except ValueError:  # the model has another policy: as if convert had not been called
        unconvert(model)
        raise


def _warn_of_little(model: nn.Module, chosen: int) -> None:
    quantised, plain = quantised_parameters(model), sum(entry.parameters for entry in unquantised(model)) - chosen
    if quantised < plain:
        text = (
            f"only {quantised / (quantised + plain):.0%} of the parameters that are multiplied were converted; "
            "dsq.report(model, *inputs) says what was left, and why"
        )
        warnings.warn(text, stacklevel=3)


def _check_types(function: str, model: nn.Module, config: DSQConfig) -> None:
    if not isinstance(model, nn.Module) or not isinstance(config, DSQConfig):
        raise TypeError(f"{function} takes a torch.nn.Module and a DSQConfig, got {type(model)} and {type(config)}")
