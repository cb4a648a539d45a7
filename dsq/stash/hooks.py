"""Contexts that are active while a model's forward runs: the one helper of policies that use saved-tensor hooks.

Facts of PyTorch this file is written around (2.13):
- Of nested saved_tensors_hooks only the innermost pair sees a tensor; tensors given to ctx.save_for_backward are seen
  too.
- pack gets the tensor itself, outputs (softmax, ReLU, ...) included: what pack returns must hold no reference to it,
  only to a detached alias, or node -> saved -> grad_fn -> node is a cycle that keeps the stash alive.
- The pair of hooks lives as long as what it packed: a tensor in a closure of pack is kept, and no graph walk shows it.
- With hooks PyTorch no longer checks that a saved tensor was left unmodified: whoever keeps one as it is must (`Kept`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsq.stash.policy import Controller

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Active:
    """A context that is entered, and the module around whose forward it is."""

    factory: ContextFactory
    module: nn.Module


class _Calls(threading.local):
    """Per thread (nn.DataParallel): the contexts entered now, outermost first."""

    def __init__(self) -> None:
        self.active: list[Active] = []
        self.packs: list[Any] = []  # pack hooks that are this package's


_CALLS = _Calls()


def around_forward(controller: Controller, model: nn.Module, factory: ContextFactory) -> None:
    """Enter factory() by a forward pre-hook of the model and leave it after the forward, also when that raises.

    Nested calls of the same model enter once; a forward with gradients disabled enters nothing. The hooks are plain
    closures, so that a deep copy of the model works (it shares the controller's state). controller.remove() takes
    them away.
    """
    calls = threading.local()

    def enter(module: nn.Module, args: Any) -> None:
        if not hasattr(calls, "stack"):
            calls.stack = []
        entered = ExitStack()
        if torch.is_grad_enabled():
            entered.enter_context(reenter((Active(factory, module),)))
        calls.stack.append(entered)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(calls, "stack", None):  # empty when another pre-hook raised before ours
            calls.stack.pop().close()

    controller.undo.callback(model.register_forward_pre_hook(enter, prepend=True).remove)
    controller.undo.callback(model.register_forward_hook(leave, always_call=True).remove)


@contextmanager
def _activate(context: Active) -> Iterator[None]:
    _CALLS.active.append(context)
    try:
        with context.factory():
            top = innermost_hooks()
            with _ours(None if top is None else top[0]):
                yield
    finally:
        _CALLS.active.pop()


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch keeps it as it is
innermost_hooks: Callable[[], Hooks | None] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


@contextmanager
def _ours(pack: Callable[[Tensor], Any] | None) -> Iterator[None]:
    _CALLS.packs.append(pack)
    try:
        yield
    finally:
        _CALLS.packs.pop()


def rules_may_act() -> bool:
    """Whether the innermost hooks are this package's (or none), and gradients are on.

    torch.utils.checkpoint's non-reentrant hooks count saved tensors and compare shapes with those of the recomputation,
    where no rule acts: inside them every op saves what PyTorch saves.
    """
    top = innermost_hooks()
    return torch.is_grad_enabled() and (top is None or top[0] in _CALLS.packs)


@dataclass(frozen=True)
class Outer:
    """A saved tensor in the form that the hooks further out gave it."""

    packed: Any
    unpack: Callable[[Any], Tensor]

    def get(self) -> Tensor:
        """The tensor."""
        return self.unpack(self.packed)


def pass_on(tensor: Tensor, outer: Hooks | None) -> Outer | Kept:
    """What hooks that leave a tensor alone keep of it: what the next hooks outwards make of it, or itself."""
    return Kept.of(tensor) if outer is None else Outer(outer[0](tensor), outer[1])


def get(saved: Any) -> Tensor:
    """The unpack hook of objects that know their tensor."""
    return saved.get()


class op_hooks:  # a generator takes three times as long
    """Hooks around one op: pack_one(tensor) gives an object with get(), or None to pass the tensor on outwards."""

    def __init__(self, pack_one: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor] = get) -> None:
        outer = innermost_hooks()
        outwards = outer[0] if outer is not None and outer[1] is get else lambda tensor: pass_on(tensor, outer)

        def pack(tensor: Tensor) -> Any:
            saved = pack_one(tensor)
            return outwards(tensor) if saved is None else saved

        self.pack, self.unpack = pack, unpack

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        _CALLS.packs.append(self.pack)

    def __exit__(self, *error: object) -> None:
        _CALLS.packs.pop()
        torch._C._autograd._pop_saved_tensors_default_hooks()


def active_contexts() -> tuple[Active, ...]:
    """What is entered now; a checkpoint remembers it in the forward ..."""
    return tuple(_CALLS.active)


@contextmanager
def reenter(contexts: tuple[Active, ...]) -> Iterator[None]:
    """... and enters it again around the recomputation, so that the recomputed stash is packed too."""
    with ExitStack() as stack:
        for context in contexts:
            if all(context.factory != entered.factory for entered in _CALLS.active):
                stack.enter_context(_activate(context))
        yield


@dataclass(eq=False, slots=True, weakref_slot=True)  # made for every saved tensor: frozen takes three times as long
class Kept:
    """A saved tensor kept as it is, with the check that autograd leaves to whoever installs hooks."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        alias = tensor.detach()  # same storage, same version counter, no grad_fn
        return cls(alias, alias._version)

    def get(self) -> Tensor:
        """The tensor; RuntimeError when it was modified in place after it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} needed for the gradient was modified in place after it "
                f"was saved (version {self.tensor._version}, saved at {self.version})"
            )
        return self.tensor


def refuse_create_graph() -> None:
    """RuntimeError in a backward with create_graph=True: a second derivative of rounded or sampled values is wrong."""
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "dsq.stash keeps this model's activations in a form that is differentiable once: create_graph=True is not "
            "supported, apart from policy 'selective'"
        )


def storage_key(tensor: Tensor) -> tuple[int, int]:
    """(storage, version): equal for two live tensors exactly when they hold the same memory in the same state.

    Safe as a dictionary key only while a StorageWeakRef of that storage is held beside it (it keeps the address from
    being reused): let the cached object hold `StorageWeakRef(tensor.untyped_storage())` and the cache be a
    WeakValueDictionary.
    """
    return tensor.untyped_storage()._cdata, tensor._version


def parameter_storages(model: nn.Module) -> set[int]:
    """Storages of parameters and buffers (packed in_proj slices alias them, so compare storages, never data_ptr).

    Those of the module that is running are among them: it may be a deep copy of the model, whose hooks it carries. To
    be asked at each outermost forward, because .to(), optimizers and FSDP may replace a storage.
    """
    left, seen = [model, *(context.module for context in _CALLS.active)], set()
    found = set()
    while left:  # half the time of modules(), which also names them
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        left += [child for child in module._modules.values() if child is not None]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.layout is torch.strided:
                found.add(tensor.untyped_storage()._cdata)
    return found
