"""What a saved tensor's autograd history tells: a weight in disguise, a cast of another tensor, a statistic."""

import torch
from torch import Tensor

#: the operation that made a tensor, which of its outputs it was, and how many values
Source = tuple[int, int, int]

#: nodes after which a contiguous tensor holds the same values in the same order, cast perhaps
_SAME_ORDER = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "ToCopyBackward0")
#: those of a reshape that copies; another clone is often made to be written into
_RESHAPED = ("UnsafeViewBackward0", "CloneBackward0")
#: nodes that move, repeat or cast a tensor without making an activation of it
_TRANSPARENT = frozenset(
    (
        *_SAME_ORDER,
        "ExpandBackward0",
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "RedistributeBackward",  # of a DTensor, as tensor parallel layers make a shard of their weight
        "_ToTorchTensorBackward",
    )
)


def is_weight(tensor: Tensor, storages: set[int]) -> bool:
    """Whether a saved tensor is a parameter or buffer, a view of one, or autocast's copy of one.

    storages: those of the model's parameters and buffers (storages.parameter_storages). A copy in another type has a
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


def recast_of(tensor: Tensor) -> Tensor | None:
    """The contiguous parameter of which a tensor, in a storage of its own, is a cast or a view of a cast."""
    node, latest = tensor.grad_fn, ""
    casts = 0
    while node is not None and node.name() in _TRANSPARENT:
        latest = node.name()
        casts += latest == "ToCopyBackward0"
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    if latest != "ToCopyBackward0" or casts != 1 or not isinstance(leaf, torch.nn.Parameter):
        return None
    same_size = tensor.untyped_storage().nbytes() == leaf.numel() * tensor.element_size()
    return leaf if same_size and leaf.is_contiguous() else None


def source_of(tensor: Tensor) -> Source | None:
    """Equal for contiguous tensors of one forward that are one operation's output, reshaped or cast; None: not known.
    Only as long as nothing writes into that output without autograd's knowledge.

    Autocast casts a tensor anew for each of its consumers: q, k and v's linears save three copies of one input. So
    they do of an input that is not contiguous, which each reshapes.
    """
    node, output, after = tensor.grad_fn, tensor.output_nr, ""
    while node is not None and (node.name() in _SAME_ORDER or (after, node.name()) == _RESHAPED):
        after = node.name()
        node, output = node.next_functions[0]
    if node is None or hasattr(node, "variable") or not tensor.is_contiguous():
        return None
    return node._sequence_nr(), output, tensor.numel()


def is_statistic(tensor: Tensor) -> bool:
    """Whether a saved tensor is the mean or deviation beside a normalisation's output (group norm marks them so)."""
    return tensor.output_nr > 0 and tensor.grad_fn is not None and "Norm" in tensor.grad_fn.name()
