"""The saved tensors of one forward: what a quantising policy does around its own code.

pack     weights, integers and statistics stay as they are; masks take one bit a value; the rest is the policy's;
         a tensor saved twice is encoded once
unpack   the values in the shape, strides and type they were saved in; for first derivatives only
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.fx import Node

from dsq.stash.saved_tensors.forms import Copied, Kept, Narrow, Recast, Saved
from dsq.stash.saved_tensors.history import Source, is_statistic, is_weight, recast_of, source_of
from dsq.stash.saved_tensors.hooks import refuse_create_graph
from dsq.stash.saved_tensors.masks import TwoValued, one_bit
from dsq.stash.saved_tensors.memory_order import MemoryOrder, span
from dsq.stash.saved_tensors.rules.function_mode import PackOne, writes_in_place
from dsq.stash.saved_tensors.storages import StorageCache, is_plain, storage_key, weak


class Code(Protocol):
    """A tensor's values in memory order, in few bits."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The values, in `dtype`, contiguous (any shape of the right size)."""
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class SharedCode:
    """The one code of all saved views of a piece of memory."""

    code: Code


@dataclass(eq=False, slots=True, weakref_slot=True)  # as Kept
class CodedView:
    """A code, and the shape and type in which one consumer saved it."""

    shared: SharedCode
    order: MemoryOrder
    dtype: torch.dtype

    def get(self) -> Tensor:
        refuse_create_graph()
        return self.order.restore(self.shared.code.unpack(self.dtype))


class GraphPacking(Protocol):
    """How compiled graphs pack by themselves what a policy would: the nodes that do it. Equal ones, equal graphs."""

    @property
    def few(self) -> int:
        """Values up to which a tensor stays exact."""
        ...

    def pack(self, x: Node, order: Sequence[int], values: Node, flat: Node) -> Node:
        """Two uint8 tensors, of a saved tensor ``x``; ``values``: its axes in the ``order`` they lie in memory."""
        ...

    def unpack(
        self, x: Node, order: Sequence[int], parts: Sequence[Node], sizes: Sequence[int | Node], count: int | Node
    ) -> Node:
        """The ``count`` values, in memory order, of ``sizes``."""
        ...


Encoder = Callable[[Tensor, MemoryOrder, Tensor], Code | None]


class ForwardStash:
    """Pack hooks around a policy's encoder, for one forward of the model; `forms.get` is the unpack hook.

    encode(saved tensor, its memory order, its values in that order) returns the code, or None to keep the tensor exact.
    weights: storages of the model's parameters and buffers, never encoded and never counted.
    batch: storages of inputs to encode though they need no gradient; other tensors without one stay exact (the
        statistics of norms and of attention kernels are among them).
    in_graphs: None where compiled graphs leave it to the hooks.
    """

    def __init__(
        self, encode: Encoder, weights: set[int], batch: set[int], in_graphs: GraphPacking | None = None
    ) -> None:
        self.encode = encode
        self.in_graphs = in_graphs
        self.weights = weights
        self.batch = batch
        self.raw_bytes = 0
        self.kept_bytes = 0
        self._made: StorageCache[Any] = StorageCache()
        self._casts: dict[Source, ref[SharedCode]] = {}  # of tensors whose casts may be saved, too

    def pack(self, tensor: Tensor, wanted: bool = False) -> Saved:
        """Encode a floating tensor that needs a gradient, or is of the batch; keep any other exact.

        wanted: encode it though it shows no gradient, being a compiled graph's own.
        """
        if not is_plain(tensor) or not (wanted or tensor.requires_grad or self._of_batch(tensor)):
            return self.keep(tensor)
        if not tensor.is_floating_point() or is_statistic(tensor) or is_weight(tensor, self.weights):
            return self.keep(tensor)
        order, values = MemoryOrder.of(tensor)
        key = (*storage_key(tensor), *span(values))
        found = self._made.get(key)
        if isinstance(found, (Kept, Copied)):
            return self.keep(tensor)
        source = source_of(tensor)
        if found is None and source in self._casts:
            found = self._casts[source]()
        if found is None:
            code = self.encode(tensor, order, values)
            if code is None:
                return self.keep(tensor)
            found = SharedCode(code)
            self._made.put(key, found, weak(tensor))
            self._count(values.numel() * tensor.element_size(), code.nbytes)
        if source is not None:
            self._casts[source] = ref(found)
        return CodedView(found, order, tensor.dtype)

    def keep(self, tensor: Tensor) -> Saved:
        """Keep a tensor exact, masks in one bit a value; consumers that come later share it.

        A slice is copied, so that it does not keep what it is cut from; autocast's copy of a parameter is not kept.
        """
        if not is_plain(tensor):
            return Kept.of(tensor)
        if is_weight(tensor, self.weights):
            parameter = recast_of(tensor)
            return Kept.of(tensor) if parameter is None else Recast.of(parameter, tensor)
        mask = None if tensor.requires_grad else self._mask(tensor)
        if mask is not None:
            return mask
        order, values = MemoryOrder.of(tensor)
        key, nbytes = (*storage_key(tensor), *span(values)), values.numel() * tensor.element_size()
        found = self._made.get(key)
        if isinstance(found, Copied):
            return Copied(found.values, order)
        kept = Kept.of(tensor) if tensor.untyped_storage().nbytes() <= nbytes else Copied.of(order, values)
        if not isinstance(found, Kept):
            self._made.put(key, kept, weak(tensor))
            self._count(nbytes, nbytes)
        return kept

    def pack_by_rule(self, pack_one: PackOne, tensor: Tensor) -> Saved | None:
        """What a rule keeps of a tensor, counted with the rest; one that it wants exact is shared with the rest too."""
        saved = pack_one(tensor)
        if isinstance(saved, Kept):
            return self.keep(tensor)
        if isinstance(saved, (TwoValued, Narrow)):
            self.kept_bytes += saved.nbytes
        return saved

    def note_call(self, func: Any, kwargs: Any) -> None:
        """Casts of one tensor are told by its graph, which a write that autograd does not know of leaves as it is."""
        if self._casts and (not torch.is_grad_enabled() or writes_in_place(func, kwargs)):
            self._casts.clear()

    def _of_batch(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.batch and one_bit(tensor) is None

    def _mask(self, tensor: Tensor) -> TwoValued | None:
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (*storage_key(tensor), "mask", *view)
        found: TwoValued | None = self._made.get(key)
        if found is None and (found := one_bit(tensor)) is not None:
            self._made.put(key, found, weak(tensor))
            self._count(tensor.numel() * tensor.element_size(), found.nbytes)
        return found

    def _count(self, raw: int, kept: int) -> None:
        self.raw_bytes += raw
        self.kept_bytes += kept
