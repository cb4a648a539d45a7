"""Contexts that are active while a model's forward runs: the one helper of policies that use saved-tensor hooks.

Facts of PyTorch this file is written around (2.13):
- Of nested saved_tensors_hooks only the innermost pair sees a tensor; tensors given to ctx.save_for_backward are seen
  too.
- pack gets the tensor itself, outputs (softmax, ReLU, ...) included: what pack returns must hold no reference to it,
  only to a detached alias, or node -> saved -> grad_fn -> node is a cycle that keeps the stash alive.
- With hooks PyTorch no longer checks that a saved tensor was left unmodified: whoever keeps one as it is must (`Kept`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.policy import Controller

ContextFactory = Callable[[], AbstractContextManager[Any]]


class _Calls(threading.local):
    """Per thread (nn.DataParallel): the factories entered now, outermost first."""

    def __init__(self) -> None:
        self.active: list[ContextFactory] = []


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
        if torch.is_grad_enabled() and factory not in _CALLS.active:
            entered.enter_context(_activate(factory))
        calls.stack.append(entered)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(calls, "stack", None):  # empty when another pre-hook raised before ours
            calls.stack.pop().close()

    controller.undo.callback(model.register_forward_pre_hook(enter, prepend=True).remove)
    controller.undo.callback(model.register_forward_hook(leave, always_call=True).remove)


@contextmanager
def _activate(factory: ContextFactory) -> Iterator[None]:
    _CALLS.active.append(factory)
    try:
        with factory():
            yield
    finally:
        _CALLS.active.pop()


def active_contexts() -> tuple[ContextFactory, ...]:
    """What is entered now; a checkpoint remembers it in the forward ..."""
    return tuple(_CALLS.active)


@contextmanager
def reenter(factories: tuple[ContextFactory, ...]) -> Iterator[None]:
    """... and enters it again around the recomputation, so that the recomputed stash is packed too."""
    with ExitStack() as stack:
        for factory in factories:
            if factory not in _CALLS.active:
                stack.enter_context(_activate(factory))
        yield


@dataclass(frozen=True)
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


def storage_key(tensor: Tensor) -> tuple[int, int]:
    """(storage, version): equal for two live tensors exactly when they hold the same memory in the same state.

    Safe as a dictionary key only while a StorageWeakRef of that storage is held beside it (it keeps the address from
    being reused): let the cached object hold `StorageWeakRef(tensor.untyped_storage())` and the cache be a
    WeakValueDictionary.
    """
    return StorageWeakRef(tensor.untyped_storage()).cdata, tensor._version


def parameter_storages(model: nn.Module) -> set[int]:
    """Storages of parameters and buffers (packed in_proj slices alias them, so compare storages, never data_ptr).

    Recomputed at each outermost forward, because .to(), optimizers and FSDP may replace a storage.
    """
    return {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
