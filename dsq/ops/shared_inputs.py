"""Layers that read the same input (q, k and v of an attention, decoder blocks the encoder's output) share its codes.

Sharing ends with the forward, which the outermost call of a module that ``dsq.convert`` was given, or of a part of it
with several layers, bounds (dsq/layers/forwards.py). The backward bounds what a checkpoint recomputes. Layers that are
called outside of both share nothing: a buffer may have been refilled since another layer read it, past autograd's
version counter, by NumPy, ``x.data.copy_`` or a collective.

Under ``stash="all"`` the stash of the forward is where layers share (dsq/stash/stash.py).
"""

import threading
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.kernels.backend import Codes, Operand
from dsq.ops.call_count import Calls


class _Entry(NamedTuple):
    source: StorageWeakRef  #: while it lives no other storage has the address that the key names
    codes: ref[torch.UntypedStorage]  #: while a graph keeps them
    scales: ref[torch.UntypedStorage]
    shapes: tuple[torch.Size, torch.Size, torch.Size]  #: of codes, scales and values


class InputCodes:
    """The codes that layers made of their inputs in one forward."""

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}
        self.calls: Calls | None = {} if torch.is_grad_enabled() else None  #: None in an evaluation

    def find(self, key: Any) -> Codes | None:
        """Return the codes that a layer made of an input with this ``input_key``."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        codes, scales = entry.codes(), entry.scales()
        if codes is None or scales is None:  # hooks may save other tensors in their place
            return None
        return Codes(_tensor(codes, entry.shapes[0]), _tensor(scales, entry.shapes[1]), entry.shapes[2])

    def put(self, key: Any, x: Tensor, codes: Codes) -> None:
        """Note the codes that a layer made of ``x``, whose ``input_key`` is ``key``."""
        storages = ref(codes.codes.untyped_storage()), ref(codes.scales.untyped_storage())
        shapes = codes.codes.shape, codes.scales.shape, codes.shape
        self._entries[key] = _Entry(StorageWeakRef(x.untyped_storage()), *storages, shapes)


def input_key(x: Tensor, operand: Operand, nearest: bool) -> Any:
    """Return the memory of an input and its version, and how it is packed: equal where layers may share codes."""
    memory = x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
    return x._version, memory, operand, nearest


def _tensor(storage: torch.UntypedStorage, shape: torch.Size) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(shape)


class _Running(threading.local):
    """The forward, and the backward, that this thread is in."""

    owner: object = None  #: the model or module whose call bounds the forward
    forward: InputCodes | None = None
    task: int = -1  #: number of the backward
    backward: InputCodes | None = None


RUNNING = _Running()


def input_codes() -> InputCodes | None:
    """Return the codes of the forward that this thread is in, or of the backward that recomputes a part of one."""
    if RUNNING.forward is not None:
        return RUNNING.forward
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    if task != RUNNING.task:
        RUNNING.task, RUNNING.backward = task, InputCodes()
    return RUNNING.backward


def begin_forward(owner: object) -> None:
    """Begin the forward of ``owner``, if this thread is in none. (In one of its own, it was interrupted before.)"""
    if RUNNING.forward is None or RUNNING.owner is owner:
        RUNNING.owner, RUNNING.forward = owner, InputCodes()


def end_forward(owner: object) -> None:
    """End the forward of ``owner``, if it is the one that this thread is in."""
    if RUNNING.owner is owner:
        RUNNING.owner = RUNNING.forward = None
