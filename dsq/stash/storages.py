"""Which memory a tensor lies in, and what was made of it before."""

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

Key = tuple[Hashable, ...]
Value = TypeVar("Value")
_ROOM = 256


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values are those in its memory: not sparse, no part of a lazy conjugate, no DTensor. Every
    policy keeps others as they are.
    """
    return tensor.layout is torch.strided and not tensor.is_neg() and not hasattr(tensor, "device_mesh")


def storage_key(tensor: Tensor) -> tuple[int, int]:
    """(storage, version): equal for two live tensors exactly when they hold the same memory in the same state."""
    return tensor.untyped_storage()._cdata, tensor._version


class StorageCache(Generic[Value]):
    """What was made of tensors, by storage_key and whatever tells one view of that memory from another.

    Refers to the values weakly, so that a graph which dies frees them. While a value is alive, no later storage may get
    the address that its key names: the value holds the storage, or put() is given a weak reference to it.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[ref[Value], StorageWeakRef | None]] = {}
        self._room = _ROOM  #: entries at which the dead are cleared away (callbacks would take longer)

    def get(self, key: Key) -> Value | None:
        """The value, if it is alive."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]()

    def put(self, key: Key, value: Value, storage: StorageWeakRef | None = None) -> None:
        """Note what was made of a tensor; its storage, where the value does not hold it."""
        if len(self._entries) >= self._room:
            entries = list(self._entries.items())  # at once: other threads may put
            self._entries = {old: entry for old, entry in entries if entry[0]() is not None}
            self._room = _ROOM + 2 * len(self._entries)
        self._entries[key] = ref(value), storage

    def pop(self, key: Key) -> Value | None:
        """The value, if it is alive; forgotten from now on."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[0]()

    def pop_all(self, expired: bool = False) -> Iterator[Value]:
        """Forget all values, or those whose storage is gone, and give those alive."""
        for key, (_, storage) in list(self._entries.items()):
            if not expired or (storage is not None and storage.expired()):
                value = self.pop(key)
                if value is not None:
                    yield value


def weak(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())


def storages_of(tree: Any) -> set[int]:
    """Storages of the strided tensors in nested lists, tuples and dicts."""
    leaves = (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return {leaf.untyped_storage()._cdata for leaf in leaves}


def parameter_storages(*models: nn.Module) -> set[int]:
    """Storages of parameters and buffers (packed in_proj slices alias them, so compare storages, never data_ptr).

    To be asked at each outermost forward, because .to(), optimizers and FSDP may replace a storage.
    """
    left, seen = list(models), set[nn.Module]()
    found = set()
    while left:  # half the time of modules(), which also names them
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        left += [child for child in module._modules.values() if child is not None]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.layout is torch.strided and not is_lazy(tensor):
                found.add(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)  # a DTensor has none
    return found
