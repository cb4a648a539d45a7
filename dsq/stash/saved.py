"""What a saved tensor is, seen from its pack hook: the memory it covers, and whether it is a weight in disguise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: nodes after which a contiguous tensor holds the same values in the same order, cast perhaps
_SAME_ORDER = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "ToCopyBackward0")
#: nodes that move, repeat or cast a tensor without making an activation of it
_TRANSPARENT = (
    *_SAME_ORDER,
    "ExpandBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "SliceBackward0",
    "SplitBackward0",
)


@dataclass(frozen=True)
class MemoryOrder:
    """A strided tensor as its distinct values in the order they lie in memory.

    Axes of stride 0 (expanded) are dropped, the others sorted from the widest stride to the narrowest, so that a
    transposed or reshaped view of one piece of memory gives the same values in the same order as the tensor it views.
    """

    sizes: tuple[int, ...]  #: of the values, in memory order
    axes: tuple[int, ...]  #: axis of the tensor that each of these is
    shape: torch.Size  #: of the tensor

    @classmethod
    def of(cls, tensor: Tensor) -> tuple[MemoryOrder, Tensor]:
        """(the order, the values): detached, axes in memory order, contiguous where the tensor has no gaps."""
        values = tensor.detach()
        if values.is_contiguous():
            return cls.contiguous(values.shape), values
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                values = values.narrow(axis, 0, 1)
        # sizes of 1 may carry any stride: they go first, where they disturb nothing
        strides = values.stride()
        axes = tuple(sorted(range(values.dim()), key=lambda axis: (values.shape[axis] > 1, -strides[axis])))
        values = values.permute(axes)
        return cls(tuple(values.shape), axes, tensor.shape), values

    @classmethod
    def contiguous(cls, shape: torch.Size) -> MemoryOrder:
        """That of a contiguous tensor."""
        return cls(shape, tuple(range(len(shape))), shape)

    def flat(self, tensor: Tensor) -> Tensor:
        """The values, (N,), of a tensor without gaps that is laid out like this one."""
        return tensor.detach().permute(self.axes).reshape(-1)

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor's shape around its values in memory order, given flat."""
        if self.sizes == self.shape and self.axes == tuple(range(len(self.axes))):
            return flat.view(self.shape)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return flat.view(self.sizes).permute(inverse).expand(self.shape)


def span(values: Tensor) -> tuple[object, ...]:
    """Equal for the values of two tensors of one storage exactly when they cover the same memory in the same order."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(values.shape, values.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return (values.storage_offset(), values.dtype, values.is_neg(), tuple(merged))


def is_weight(tensor: Tensor, storages: set[int]) -> bool:
    """Whether a saved tensor is a parameter or buffer, a view of one, or autocast's copy of one.

    storages: those of the model's parameters and buffers (hooks.parameter_storages). A copy in another type has a
    storage of its own: it is known by its graph, a chain of casts and views that starts at a leaf.
    """
    if tensor.untyped_storage()._cdata in storages:
        return True
    return isinstance(leaf_of(tensor), torch.nn.Parameter)


def leaf_of(tensor: Tensor) -> Tensor | None:
    """The leaf that needs a gradient of which a tensor is a view or a cast, if it is one."""
    if tensor.is_leaf:
        return tensor if tensor.requires_grad else None
    node = tensor.grad_fn
    while node is not None and node.name() in _TRANSPARENT:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def source_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Equal for contiguous tensors of one forward that are one operation's output, reshaped or cast; None: not known.
    Only as long as nothing writes into that output without autograd's knowledge.

    Autocast casts a tensor anew for each of its consumers: q, k and v's linears save three copies of one input.
    """
    node, output = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name() in _SAME_ORDER:
        node, output = node.next_functions[0]
    if node is None or hasattr(node, "variable") or not tensor.is_contiguous():
        return None
    return node._sequence_nr(), output, tensor.numel()


def is_statistic(tensor: Tensor) -> bool:
    """Whether a saved tensor is the mean or deviation beside a normalisation's output (group norm marks them so)."""
    return tensor.grad_fn is not None and "Norm" in tensor.grad_fn.name() and tensor.output_nr > 0
