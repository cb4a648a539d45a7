"""An independent count of what a forward keeps: the storages that PyTorch's ops made and that are alive afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Births(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, tuple[StorageWeakRef, int]] = {}
        self.older: list[Tensor] = []  # held, so that no newborn gets the address of one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.born:
                self.older.append(leaf.detach())
        result = func(*args, **(kwargs or {}))
        addresses = {t.untyped_storage()._cdata for t in self.older}
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in addresses:
                ref = StorageWeakRef(leaf.untyped_storage())
                self.born[ref.cdata] = (ref, leaf.untyped_storage().nbytes())
        return result


def saved_bytes(fn: Callable[[], Tensor]) -> int:
    """Bytes of storages born in ``fn`` and alive while its result (4 bytes, not counted) is.

    No walk of any graph, no hook: it does not matter who holds them. Tensors made before ``fn`` are not seen.
    """
    births = _Births()
    with births:
        result = fn()
    gc.collect()
    address = result.untyped_storage()._cdata
    return sum(n for key, (ref, n) in births.born.items() if not ref.expired() and key != address)


def left_bytes(fn: Callable[[], object]) -> int:
    """Bytes of storages born in ``fn`` and alive when it has returned and its result is gone."""
    births = _Births()
    with births:
        fn()
    return sum(n for ref, n in births.born.values() if not ref.expired())


def peak_bytes(fn: Callable[[], Tensor]) -> int:
    """The most bytes that tensors take at once in ``fn`` and the backward of its sum, above those that were there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn().sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
