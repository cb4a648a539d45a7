"""The saved tensors of one forward: what a quantising policy does around its own code.

pack     weights, integers and statistics stay as they are; masks take one bit a value; the rest is the policy's;
         a tensor saved twice is encoded once
unpack   the values in the shape, strides and type they were saved in; for first derivatives only
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from dsq.stash.calls import PackOne, Saved, writes_in_place
from dsq.stash.forms import Narrow
from dsq.stash.hooks import Kept, refuse_create_graph, storage_key
from dsq.stash.masks import Mask, TwoValued, one_bit
from dsq.stash.saved import MemoryOrder, is_statistic, is_weight, source_of, span


class Code(Protocol):
    """A tensor's values in memory order, in few bits."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The values, in `dtype` (any shape of the right size)."""
        ...


@dataclass(eq=False)
class Stash:
    """The one code of all saved views of a piece of memory."""

    code: Code
    #: keeps the storage's address from being given to another while this lives
    source: StorageWeakRef = field(repr=False)


@dataclass(frozen=True)
class View:
    """What one pack hook gave back: a stash, and the shape and type in which this consumer saved it."""

    stash: Stash
    order: MemoryOrder
    dtype: torch.dtype

    def get(self) -> Tensor:
        refuse_create_graph()
        return self.order.restore(self.stash.code.unpack(self.dtype).reshape(-1))


@dataclass(frozen=True)
class SharedMask:
    """An exact mask; like a Stash it holds the address of the storage it was made from."""

    mask: TwoValued
    source: StorageWeakRef = field(repr=False)

    def get(self) -> Tensor:
        return self.mask.get()


Packed = View | Kept | SharedMask
Encoder = Callable[[Tensor, MemoryOrder, Tensor], Code | None]


class ForwardStash:
    """Pack hooks around a policy's encoder, for one forward of the model; what they return has get(), the unpack hook.

    encode(saved tensor, its memory order, its values in that order) returns the code, or None to keep the tensor exact.
    storages: those of the model's parameters and buffers, never encoded and never counted.
    batch: storages of inputs to encode though they need no gradient; other tensors without one stay exact (the
        statistics of norms and of attention kernels are among them).
    """

    def __init__(self, encode: Encoder, storages: set[int], batch: set[int]) -> None:
        self.encode = encode
        self.storages = storages
        self.batch = batch
        self.raw_bytes = 0
        self.kept_bytes = 0
        self._made: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
        self._cast: WeakValueDictionary[tuple[int, int, int] | None, Stash] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Packed:
        """Encode a floating tensor that needs a gradient, or is of the batch; keep any other exact."""
        encodable = tensor.is_floating_point() and tensor.layout is torch.strided
        if not encodable or is_weight(tensor, self.storages) or is_statistic(tensor):
            return self.keep(tensor)
        if not tensor.requires_grad and not self._of_batch(tensor):
            return self.keep(tensor)
        order, values = MemoryOrder.of(tensor)
        key = (*storage_key(tensor), *span(values))
        found = self._made.get(key)
        if isinstance(found, Kept):
            return Kept.of(tensor)
        source = source_of(tensor)
        found = found or self._cast.get(source)
        if found is None:
            code = self.encode(tensor, order, values)
            if code is None:
                return self.keep(tensor)
            self._made[key] = found = Stash(code, StorageWeakRef(tensor.untyped_storage()))
            self._count(values.numel() * tensor.element_size(), code.nbytes)
        if source is not None:
            self._cast[source] = found
        return View(found, order, tensor.dtype)

    def keep(self, tensor: Tensor) -> Packed:
        """Keep a tensor exact, masks in one bit a value; consumers that come later share it."""
        if tensor.layout is not torch.strided or is_weight(tensor, self.storages):
            return Kept.of(tensor)
        mask = None if tensor.requires_grad else self._mask(tensor, one_bit)
        if mask is not None:
            return mask
        _, values = MemoryOrder.of(tensor)
        key = (*storage_key(tensor), *span(values))
        kept = Kept.of(tensor)
        if not isinstance(self._made.get(key), Kept):
            self._made[key] = kept
            nbytes = values.numel() * tensor.element_size()
            self._count(nbytes, nbytes)
        return kept

    def keep_sign(self, tensor: Tensor) -> Packed:
        """Of a ReLU's output, where it is above 0, or NaN: all that its backward asks."""
        mask = self._mask(tensor, lambda t: TwoValued(Mask.of(t), 0.0, 1.0, t.dtype))
        assert mask is not None
        return mask

    def form(self, pack_one: PackOne, tensor: Tensor) -> Saved | None:
        """What a rule keeps of a tensor, counted with the rest."""
        saved = pack_one(tensor)
        if isinstance(saved, (TwoValued, Narrow)):
            self.kept_bytes += saved.nbytes
        return saved

    def note_call(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        """Casts of one tensor are told by its graph, which a write that autograd does not know of leaves as it is."""
        if self._cast and (not torch.is_grad_enabled() or writes_in_place(func, kwargs)):
            self._cast.clear()

    def _of_batch(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.batch and one_bit(tensor) is None

    def _mask(self, tensor: Tensor, make: Callable[[Tensor], TwoValued | None]) -> SharedMask | None:
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()
        key = (*storage_key(tensor), "mask", *view)
        found = self._made.get(key)
        if found is None and (mask := make(tensor)) is not None:
            self._made[key] = found = SharedMask(mask, StorageWeakRef(tensor.untyped_storage()))
            self._count(tensor.numel() * tensor.element_size(), mask.nbytes)
        return found

    def _count(self, raw: int, kept: int) -> None:
        self.raw_bytes += raw
        self.kept_bytes += kept


def storages_of(tree: Any) -> set[int]:
    """Storages of the strided tensors in nested lists, tuples and dicts."""
    leaves = (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return {leaf.untyped_storage()._cdata for leaf in leaves}
