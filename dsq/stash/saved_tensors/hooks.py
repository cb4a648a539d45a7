"""Contexts that are active while a model's forward runs, and hooks around one op.

Facts of PyTorch (2.13) this is written around:
- Of nested saved_tensors_hooks only the innermost pair sees a tensor; tensors given to ctx.save_for_backward are seen
  too.
- The pair of hooks lives as long as what it packed: a tensor in a closure of pack is kept, and no graph walk shows it.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dsq.stash.controller import Controller, SharedByCopies
from dsq.stash.saved_tensors.forms import Hooks, Saved, get, pass_on

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Active:
    """A context that is entered, and the module around whose forward it is."""

    factory: ContextFactory
    module: nn.Module


class _Entered(threading.local):
    """Per thread (nn.DataParallel): the contexts entered now, outermost first."""

    def __init__(self) -> None:
        self.active: list[Active] = []
        self.packs: list[Any] = []  # pack hooks that are this package's
        self.forwards: list[_Forward] = []


_ENTERED = _Entered()


@dataclass(frozen=True)
class _Forward:
    """A forward under a policy: what is to be left after it, and the frame that called the hooks before it."""

    around: "_Around"
    contexts: ExitStack
    caller: FrameType

    def runs(self) -> bool:
        """Whether it does. PyTorch calls no hook after a forward that KeyboardInterrupt ended."""
        frame = sys._getframe()
        while frame is not self.caller and frame.f_back is not None:
            frame = frame.f_back
        return frame is self.caller


def leave_interrupted() -> None:
    """Leave the contexts of forwards that were broken off."""
    while _ENTERED.forwards and not _ENTERED.forwards[-1].runs():
        _ENTERED.forwards.pop().contexts.close()


class _Around(SharedByCopies):
    """The two hooks of around_forward. Removed while a forward runs, of any thread, the second stays until its end."""

    def __init__(self, factory: ContextFactory, model: nn.Module) -> None:
        self.factory = factory
        self.running: list[nn.Module] = []
        self.removed = False
        self.leaving = model.register_forward_hook(self.leave, always_call=True)
        self.id = self.leaving.id  #: that of a copy of the model, too

    def remove(self) -> None:
        self.removed = True
        if not self.running:
            self.leaving.remove()

    def _left(self) -> None:
        self.running.pop()
        if self.removed:
            self.remove()

    def enter(self, module: nn.Module, args: Any) -> None:
        leave_interrupted()
        contexts = ExitStack()
        self.running.append(module)
        contexts.callback(self._left)
        if torch.is_grad_enabled():
            take_off_leftovers()
            contexts.enter_context(reenter((Active(self.factory, module),)))
        _ENTERED.forwards.append(_Forward(self, contexts, sys._getframe(1)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        forwards = _ENTERED.forwards
        if forwards and forwards[-1].around is self:  # else another pre-hook raised before ours
            forwards.pop().contexts.close()


def around_forward(controller: Controller, model: nn.Module, factory: ContextFactory) -> None:
    """Enter factory() by a forward pre-hook of the model and leave it after the forward, also when that raises.

    After a KeyboardInterrupt it is left before the next forward under a policy, or by controller.remove(), which takes
    the hooks away (called inside a forward, once that is over). Nested calls of the same model enter once; a forward
    with gradients disabled enters nothing.
    """
    around = _Around(factory, model)
    controller.undo.callback(leave_interrupted)
    controller.until_removed(model.register_forward_pre_hook(around.enter, prepend=True))
    controller.until_removed(around)


#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch keeps it as it is
innermost_hooks: Callable[[], Hooks | None] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


class Leftover:
    """Whose bound method is a pack hook that outlives the forward that pushed it: window.py."""


def take_off_leftovers() -> None:
    """Remove such hooks, if no context of the user's lies above them."""
    top = innermost_hooks()
    while top is not None and isinstance(getattr(top[0], "__self__", None), Leftover):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        top = innermost_hooks()


def active_contexts() -> tuple[Active, ...]:
    """What is entered now; a checkpoint remembers it in the forward ..."""
    return tuple(_ENTERED.active)


@contextmanager
def reenter(contexts: tuple[Active, ...]) -> Iterator[None]:
    """... and enters it again around the recomputation, so that the recomputed stash is packed too."""
    with ExitStack() as stack:
        for context in contexts:
            if all(context.factory != entered.factory for entered in _ENTERED.active):
                stack.enter_context(_activate(context))
        yield


@contextmanager
def _activate(context: Active) -> Iterator[None]:
    _ENTERED.active.append(context)
    try:
        with context.factory():
            top = innermost_hooks()
            _ENTERED.packs.append(None if top is None else top[0])
            try:
                yield
            finally:
                _ENTERED.packs.pop()
    finally:
        _ENTERED.active.pop()


def rules_may_act() -> bool:
    """Whether the innermost hooks are this package's (or none), and gradients are on.

    torch.utils.checkpoint's non-reentrant hooks count saved tensors and compare shapes with those of the recomputation,
    where no rule acts: inside them every op saves what PyTorch saves.
    """
    top = innermost_hooks()
    return torch.is_grad_enabled() and (top is None or top[0] in _ENTERED.packs)


class op_hooks:  # a generator takes three times as long
    """Hooks around one op: pack_one(tensor) gives a form, or None to pass the tensor on outwards."""

    def __init__(self, pack_one: Callable[[Tensor], Saved | None], unpack: Callable[[Any], Tensor] = get) -> None:
        outer = innermost_hooks()
        outwards = outer[0] if outer is not None and outer[1] is get else lambda tensor: pass_on(tensor, outer)

        def pack(tensor: Tensor) -> Any:
            saved = pack_one(tensor)
            return outwards(tensor) if saved is None else saved

        self.pack, self.unpack = pack, unpack

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        _ENTERED.packs.append(self.pack)

    def __exit__(self, *error: object) -> None:
        _ENTERED.packs.pop()
        torch._C._autograd._pop_saved_tensors_default_hooks()


def in_backward() -> bool:
    """Whether a backward is running in this thread: what is saved now is a recomputation's."""
    return torch._C._current_graph_task_id() != -1


def refuse_create_graph() -> None:
    """RuntimeError in a backward with create_graph=True: a second derivative of rounded or sampled values is wrong."""
    if torch.is_grad_enabled() and in_backward():
        raise RuntimeError(
            "dsq.stash keeps this model's activations in a form that is differentiable once: create_graph=True is not "
            "supported, apart from policy 'selective'"
        )
