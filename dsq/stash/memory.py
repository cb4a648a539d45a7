"""Which memory a tensor lies in: its storage, and its distinct values in the order they lie there."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.ops.shared_inputs import version


def weak(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage. While it lives, no other storage has the address."""
    return StorageWeakRef(tensor.untyped_storage())


def is_weight(x: Tensor) -> bool:
    """Return whether ``x`` is a parameter, or a view of one."""
    if isinstance(x, nn.Parameter):
        return True
    return x._is_view() and isinstance(x._base, nn.Parameter)


def may_be_freed(x: Tensor) -> bool:
    """Return whether the owner of ``x`` may free or swap its memory: of a weight, or a view of one. Those of
    torch.func.functional_call are no parameters."""
    base = x if x._base is None else x._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


@dataclass(frozen=True)
class MemoryOrder:
    """A strided tensor as its distinct values in the order they lie in memory: the same for all views of that memory.

    Axes of stride 0 (expanded) are dropped, the others sorted from the widest stride to the narrowest, so that a
    transposed or reshaped view of one piece of memory gives the same values in the same order as the tensor it views.
    """

    sizes: tuple[int, ...]  #: of the values, in memory order
    axes: tuple[int, ...]  #: axis of the tensor that each of these is
    shape: torch.Size  #: of the tensor
    is_contiguous: bool = False  #: the values lie as in a contiguous tensor

    @staticmethod
    @lru_cache(maxsize=4096)  # of a tensor's shape, of which training has few
    def contiguous(shape: torch.Size) -> "MemoryOrder":
        return MemoryOrder(shape, tuple(range(len(shape))), shape, is_contiguous=True)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the distinct values, (N,), of a tensor without gaps that is laid out like this one."""
        return tensor.detach().as_strided(self.sizes, [tensor.stride(axis) for axis in self.axes]).reshape(-1)

    def restore(self, values: Tensor) -> Tensor:
        """Return the tensor's shape around its values in memory order, given contiguous, in any shape."""
        if self.is_contiguous:
            return values.view(self.shape)
        return values.as_strided(self.shape, self._strides)

    def owner(self, values: Tensor) -> Tensor:
        """Return the same as ``restore``, as a tensor that owns the memory of the values: an autograd function's result
        that is a view could not be changed in place."""
        if self.is_contiguous and values.shape == self.shape:
            return values
        return values.new_empty(0).set_(values.untyped_storage(), 0, self.shape, self._strides)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return the same tensor, laid out in this order without gaps."""
        return tensor if tensor.stride() == self._strides else self.restore(self.flat(tensor))

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Return the strides of the tensor, without its gaps."""
        strides = [0] * len(self.shape)
        run = 1
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            strides[axis] = run if size == self.shape[axis] else 0  # expanded
            run *= size
        return tuple(strides)


def place(x: Tensor) -> tuple[tuple[object, ...], MemoryOrder, Tensor]:
    """Return (key, order, values): the values of ``x``, detached, in memory order, contiguous where ``x`` has no gaps.

    The key is equal for two live tensors exactly when they cover the same memory, in the same state and order.
    """
    # the imaginary part of a conjugate is the memory of the number's, to be read with the other sign
    state = x.untyped_storage()._cdata, version(x), x.storage_offset(), x.dtype, x.is_neg()
    if x.is_contiguous():
        return (*state, x.numel()), MemoryOrder.contiguous(x.shape), x.detach()
    order, strides, span = _strided(x.shape, x.stride())
    return (*state, span), order, x.detach().as_strided(order.sizes, strides)


@lru_cache(maxsize=4096)
def _strided(shape: torch.Size, strides: tuple[int, ...]) -> tuple[MemoryOrder, tuple[int, ...], object]:
    """Return the order of a tensor, the strides of its values, and what tells its memory from other memory of its
    storage."""
    distinct = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    # sizes of 1 may carry any stride: they go first, where they disturb nothing
    axes = tuple(sorted(range(len(shape)), key=lambda axis: (distinct[axis] > 1, -strides[axis])))
    sizes, steps = tuple(distinct[a] for a in axes), tuple(strides[a] for a in axes)
    merged: list[tuple[int, int]] = []
    for size, step in zip(sizes, steps, strict=True):
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        elif size != 1:
            merged.append((size, step))
    whole = len(merged) <= 1 and all(step == 1 for _, step in merged)
    return MemoryOrder(sizes, axes, shape), steps, prod(sizes) if whole else tuple(merged)
