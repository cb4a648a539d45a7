"""Modules replaced in place, for policies that change what a layer keeps.

`module.__class__` is set to a subclass of its own class: names, parameters, hooks, tying, device, training flag and
every option stay, isinstance still holds, a deep copy works, and restoring is setting the class back.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dsq.stash.controller import Controller

_MISSING = object()


def swap_classes(
    controller: Controller,
    model: nn.Module,
    table: Mapping[type[nn.Module], type[nn.Module]],
    where: Callable[[str, nn.Module], bool],
) -> list[tuple[str, nn.Module]]:
    """Give each module whose EXACT type is a key of the table the class beside it; (name, module) of the changed.

    A user's subclass (its forward may differ) and a parametrised module are left alone; a module shared by several
    parents is changed once.
    """
    changed = [(n, m) for n, m in model.named_modules() if type(m) in table and where(n, m)]
    for _, module in changed:
        controller.undo.callback(setattr, module, "__class__", type(module))
        controller.swapped.append((module, type(module)))
        module.__class__ = table[type(module)]
    return changed


def set_attribute(controller: Controller, module: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute of a module; remove() restores what was there, or deletes it."""
    before = module.__dict__.get(name, _MISSING)
    controller.undo.callback(_restore, module, name, before)
    module.__dict__[name] = value


def _restore(module: nn.Module, name: str, before: Any) -> None:
    if before is _MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = before
