"""Layers that read the same input (q, k and v of an attention, decoder blocks the encoder's output) share its codes.

Sharing ends with the forward, which the outermost call of a module that ``dsq.convert`` was given, or of a part of it
with several layers, bounds (dsq/layers/forwards.py). The backward bounds what a checkpoint recomputes. Layers that are
called outside of both share nothing: a buffer may have been refilled since another layer read it, past autograd's
version counter, by NumPy, ``x.data.copy_`` or a collective. Inside of a forward such a refill is not seen.

Under ``stash="all"`` the forms of the forward hold the codes that layers share (dsq/stash/stash.py).
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.kernels.backend import Codes, Operand


class _Entry(NamedTuple):
    source: StorageWeakRef  #: while it lives no other storage has the address that the key names
    codes: ref[torch.UntypedStorage]  #: while a graph has saved them
    scales: ref[torch.UntypedStorage]
    shapes: tuple[torch.Size, torch.Size, torch.Size]  #: of codes, scales and values


class SharedInputs:
    """The codes that layers made of their inputs in one forward."""

    open = True  #: until the forward's backward: Ctrl-C leaves a forward without its end

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}

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

    def drop(self, x: Tensor) -> None:
        """Forget the codes of the memory of ``x``."""
        storage = x.untyped_storage()._cdata
        for key in [key for key in self._entries if key[0] == storage]:
            del self._entries[key]


def input_key(x: Tensor, operand: Operand, nearest: bool) -> Any:
    """Return the memory of an input and its version, and how it is packed: equal where layers may share codes."""
    rows = (x.numel(), x.shape[-1]) if x.is_contiguous() else (x.shape, x.stride())
    return x.untyped_storage()._cdata, version(x), x.storage_offset(), rows, x.dtype, operand, nearest


def version(x: Tensor) -> object:
    """Return what tells the states of the memory of ``x`` apart, which change with each operation in place.

    An inference tensor has no counter of them: none of its states equals another.
    """
    return object() if x.is_inference() else x._version


def _tensor(storage: torch.UntypedStorage, shape: torch.Size) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(shape)


class _Sharing(threading.local):
    """The forward, and the backward, that this thread is in."""

    owner: Callable[[], object] = staticmethod(lambda: None)  #: the model or module whose call bounds the forward
    forward: SharedInputs | None = None
    task: int = -1  #: number of the backward
    backward: SharedInputs | None = None


_SHARING = _Sharing()


def shared_inputs_now() -> SharedInputs | None:
    """Return those of the forward that this thread is in, or of the backward that recomputes a part of one."""
    forward = _SHARING.forward
    if forward is not None and forward.open:
        return forward
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    if task != _SHARING.task:
        _SHARING.task, _SHARING.backward = task, SharedInputs()
    return _SHARING.backward


def begin_forward(owner: object) -> None:
    """Begin the forward of ``owner`` if this thread is in none, or in one of its own that Ctrl-C left open."""
    if _SHARING.forward is None or not _SHARING.forward.open or _SHARING.owner() is owner:
        _SHARING.owner, _SHARING.forward = ref(owner), SharedInputs()


def end_forward(owner: object) -> None:
    """End the forward of ``owner``, if it is the one that this thread is in."""
    if _SHARING.owner() is owner:
        _SHARING.forward = None
