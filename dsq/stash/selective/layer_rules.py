"""What must be kept of one op's saved tensors, given who needs a gradient.

A rule acts around one call of a PyTorch function, whoever makes it (a module, a shared module, or F.relu in a model's
forward): PyTorch's own op runs, with PyTorch's own backward (but ReLU, which makes and reads bits:
masked_relu.py), and the rule decides in what form its saved tensors are kept. So every option of
every layer keeps its meaning, and gradients are equal bit for bit.

    op                            its input x is kept                its weight w is kept     else
    linear                        if w needs a gradient              if x does                (PyTorch does this itself)
    conv 1-3d, transposed         if w needs a gradient              if x does
    batch norm, instance norm,    if w needs a gradient              if x does                mean and 1/std
        by running statistics
    batch norm, instance norm,    if x or w needs a gradient         if x does                mean and 1/std
        layer and group norm
    ReLU family                   never: one bit an element
    PReLU                         if w needs a gradient, else one bit
    dropout                       never: one bit an element of its mask
    max-pool                      never: indices in the narrowest integer
    average pool                  never
(memsave, section 2.2.1; its section 2.2.2 keeps ReLU's mask in bytes.)
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dsq.stash.selective.few_bits import FEW_BITS
from dsq.stash.selective.forms import Dropped, Saved
from dsq.stash.selective.function_mode import Call, PackOne, RuleTable, needs


def _drop(x: Tensor, w: Any, keep_x: bool, keep_w: bool, any_size: bool) -> PackOne | None:
    """Drop a saved x and a saved w unless they are to be kept; a tensor that might be either is kept."""
    if keep_x and (keep_w or not isinstance(w, Tensor) or w.grad_fn is None):
        return None  # a parameter exists anyway: only a computed weight (weight norm, say) is worth dropping
    # autograd holds the pack hook as long as what it packed: no tensor may be in its closure
    numel_x = None if any_size else x.numel()
    storage_w, shape_w = (w.untyped_storage()._cdata, w.shape) if isinstance(w, Tensor) else (None, None)

    def pack(t: Tensor) -> Saved | None:
        if t.untyped_storage()._cdata == storage_w:
            return None if keep_w else Dropped.of(t)
        is_x = t.dim() > 1 and t.shape != shape_w and numel_x in (None, t.numel())
        return Dropped.of(t) if is_x and not keep_x else None

    return pack


def convolution(call: Call) -> PackOne | None:
    """conv*(input, weight, ...): the padding of 'same' may enlarge the saved input."""
    x, w = call.get(0, "input"), call.get(1, "weight")
    return _drop(x, w, keep_x=needs(w), keep_w=needs(x), any_size=True)


def batch_norm(call: Call) -> PackOne | None:
    """F.batch_norm(input, running_mean, running_var, weight, bias, training=False, ...)."""
    return _norm(call.get(0, "input"), call.get(3, "weight"), call.get(5, "training", False))


def instance_norm(call: Call) -> PackOne | None:
    """F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats=True, ...)."""
    return _norm(call.get(0, "input"), call.get(3, "weight"), call.get(5, "use_input_stats", True))


def layer_norm(call: Call) -> PackOne | None:
    """F.layer_norm(input, normalized_shape, weight, ...) and F.group_norm(input, num_groups, weight, ...)."""
    return _norm(call.get(0, "input"), call.get(2, "weight"), batch_statistics=True)


def _norm(x: Tensor, w: Any, batch_statistics: bool) -> PackOne | None:
    return _drop(x, w, keep_x=needs(w) or (batch_statistics and needs(x)), keep_w=needs(x), any_size=False)


LAYER_RULES: RuleTable = {
    **FEW_BITS,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), convolution),
    **dict.fromkeys((F.layer_norm, F.group_norm), layer_norm),
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}
