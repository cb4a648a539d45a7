"""What conversion changes of a module besides its parameters' products, and what it was before."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dsq import stash
from dsq.stash.policy import applied

#: attribute of a module some of whose settings were changed: what they were, by name
_BEFORE = "_dsq_before"


def change(module: nn.Module, name: str, value: Any) -> None:
    """Set one of _SETTINGS, or an attribute, and remember what it was."""
    before = _get(module, name)
    _set(module, name, value)
    module.__dict__.setdefault(_BEFORE, {})[name] = before


def changes(module: nn.Module) -> dict[str, Any]:
    """The settings of ``module`` that were changed, as they are now."""
    return {name: _get(module, name) for name in module.__dict__.get(_BEFORE, ())}


def undo_changes(module: nn.Module) -> None:
    """Set what was changed back to what it was."""
    for name, value in module.__dict__.pop(_BEFORE, {}).items():
        _set(module, name, value)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, without what fully_shard or a parametrization put before it."""
    fsdp, kind = sys.modules.get("torch.distributed.fsdp"), type(module)
    if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule:
        return kind.__bases__[1]
    return kind.__bases__[0] if is_parametrized(module) else kind


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give ``module`` another class; one that fully_shard sharded stays so, as do its parametrizations."""
    before = type(module)
    if class_of(module) is before.__bases__[0] and is_parametrized(
        module
    ):  # whose class has the parameters' properties
        own = {name: value for name, value in vars(before).items() if name not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), own)
    elif class_of(module) is not before:  # as fully_shard makes its classes
        kind = type(f"FSDP{kind.__name__}", (before.__bases__[0], kind), {"__deepcopy__": vars(before)["__deepcopy__"]})
    module.__class__ = kind


def _set_stash(module: nn.Module, packed: bool) -> None:
    if packed:
        stash.apply(module, "bfp")
    else:
        applied(module)["bfp"].remove(module)  # of a deep copy: the two share the policy


class _Setting(NamedTuple):
    """A setting that is no attribute of its module."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


_SETTINGS = {
    "class": _Setting(class_of, set_class),
    #: the attention function, in models of transformers
    "attention": _Setting(lambda m: m.config._attn_implementation, lambda m, name: m.set_attn_implementation(name)),
    #: whether what the operations of dsq.stash's table keep is packed
    "stash": _Setting(lambda module: "bfp" in applied(module), _set_stash),
}


def _get(module: Any, name: str) -> Any:
    return _SETTINGS[name].get(module) if name in _SETTINGS else getattr(module, name)


def _set(module: Any, name: str, value: Any) -> None:
    if name in _SETTINGS:
        _SETTINGS[name].set(module, value)
    else:
        setattr(module, name, value)
