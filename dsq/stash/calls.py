"""Calls of a model go through its policies: the model's class is set to a subclass of itself whose ``__call__`` enters
them. Copies and replicas of the model carry it.
"""

import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from dsq.stash.controller import APPLIED, RUNNING, Controller, SharedByCopies


def applied(model: nn.Module) -> dict[str, Controller]:
    """The policies applied to this very module (not to its children), name to controller, the first applied first."""
    here: dict[str, Controller] = model.__dict__.get(APPLIED, {})
    return here


def intercept(controller: Controller, model: nn.Module) -> None:
    """Let calls of ``model`` go through ``controller.call``, until the controller is removed."""
    applied_here: dict[str, Controller] = model.__dict__.setdefault(APPLIED, {})
    applied_here[controller.name] = controller
    controller.undo.append((_release, (model, controller)))
    own = type(model)
    if not hasattr(own, "_dsq_plain"):
        object.__setattr__(model, "__class__", _intercepted(own))  # a compiled module passes what is set on


def _release(model: nn.Module, controller: Controller) -> None:
    here = applied(model)
    here.pop(controller.name, None)
    if here:
        return
    del model.__dict__[APPLIED]
    if "_dsq_plain" in vars(type(model)):  # else FSDP made a class of ours, which does nothing now
        object.__setattr__(model, "__class__", vars(type(model))["_dsq_plain"])


def _intercepted(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return under_policies(self, partial(own.__call__, self), *args, **kwargs)

    names = {"__call__": call, "_dsq_plain": own, "__module__": own.__module__, "__qualname__": own.__qualname__}
    kind: Any = _Unpicklable if type(own) is type else type(own)
    return kind(own.__name__, (own,), names)  # type: ignore[no-any-return]


def under_policies(model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run``, a part of ``model`` that is not its forward, under the policies applied to it."""
    for policy in applied(model).values():
        run = partial(policy.call, model, run)
    return run(*args, **kwargs)


class _Unpicklable(type):
    """The type of classes that are made here: pickle asks for one and gets the refusal of a model under a policy."""


copyreg.pickle(_Unpicklable, lambda _: SharedByCopies().__reduce__())


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Run the forward of ``model`` inside as if no stash policy were applied to it or to a module in it.

    Segments of the policy "checkpoint" go on being recomputed, which changes no number. Compiled blocks are called
    eagerly by whoever needs it (``dsq.stash.policy.run_eagerly``).
    """
    noted: list[tuple[Controller, nn.Module]] = []
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    for owner in model.modules():
        for controller in applied(owner).values():
            noted.append((controller, owner))
            twins = dict(zip(controller.model.modules(), owner.modules(), strict=False))  # owner may be a deep copy
            swapped += [(twins.get(module, module), kind) for module, kind in controller.swapped]
    classes = [(module, type(module)) for module, _ in swapped]
    for module, kind in swapped:
        module.__class__ = kind
    RUNNING.entered.extend(noted)
    try:
        yield
    finally:
        del RUNNING.entered[len(RUNNING.entered) - len(noted) :]
        for module, kind in classes:
            module.__class__ = kind
