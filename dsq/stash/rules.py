"""What must be kept of one op's saved tensors, given who needs a gradient: the table, and the mode that applies it.

A rule acts around one call of a PyTorch function, whoever makes it (a module, a shared module, or F.relu in a model's
forward): PyTorch's own op runs, with PyTorch's own backward, and the rule decides in what form its saved tensors are
kept. So every option of every layer keeps its meaning, and gradients are equal bit for bit.

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
(memsave, section 2.2.1; its section 2.2.2 keeps ReLU's mask in bytes.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsq.stash.hooks import op_hooks, rules_may_act
from dsq.stash.masks import Mask, PackedBool, TwoValued, scaled_mask


class Saved(Protocol):
    """A saved tensor in some form; get() gives the tensor, or one that the op's backward cannot tell from it."""

    def get(self) -> Tensor: ...


PackOne = Callable[[Tensor], Saved | None]  # None: as it is, or as the policies further out want it
Rule = Callable[["Call"], PackOne | None]  # None: nothing to gain in this call


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument of that position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class Rules(TorchFunctionMode):
    """While entered, calls of the functions in the table are made under their rules."""

    def __init__(self, table: Mapping[Callable[..., Any], Rule]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self.table.get(func)
        pack = rule(Call(args, kwargs)) if rule is not None and rules_may_act() else None
        if pack is None:
            return func(*args, **kwargs)
        with op_hooks(pack):
            return func(*args, **kwargs)


def needs(x: Any) -> bool:
    """Whether a gradient of ``x`` is wanted."""
    return isinstance(x, Tensor) and x.requires_grad


# ---- ops linear in x and in w: drop what the missing gradient would have used ----


@dataclass(eq=False)
class StandIn:
    """Memory of any content, made in the backward, that every dropped tensor of one kind then shares.

    Fresh memory for each would cost more in page faults than the op that ignores it.
    """

    memory: Tensor

    def at_least(self, numel: int) -> Tensor:
        """The memory, grown to ``numel`` elements."""
        if self.memory.numel() < numel:
            self.memory = torch.empty(numel, dtype=self.memory.dtype, device=self.memory.device)
        return self.memory


#: alive as long as a dropped tensor of its kind is
_stand_ins: WeakValueDictionary[tuple[torch.dtype, torch.device], StandIn] = WeakValueDictionary()


@dataclass(frozen=True)
class Dropped:
    """A saved tensor that the backward asks for its shape and layout only: its values change no result."""

    shape: torch.Size
    stride: tuple[int, ...]
    stand_in: StandIn

    @classmethod
    def of(cls, x: Tensor) -> Dropped:
        """The shape and layout of ``x``."""
        kind = (x.dtype, x.device)
        stand_in = _stand_ins.get(kind) or StandIn(torch.empty(0, dtype=x.dtype, device=x.device))
        return cls(x.shape, x.stride(), _stand_ins.setdefault(kind, stand_in))

    def get(self) -> Tensor:
        """Memory of that shape and layout."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.stand_in.at_least(span).as_strided(self.shape, self.stride)


def _drop(x: Tensor, w: Any, keep_x: bool, keep_w: bool, any_size: bool) -> PackOne | None:
    """Drop a saved x and a saved w unless they are to be kept; a tensor that might be either is kept."""
    if keep_x and (keep_w or not isinstance(w, Tensor) or w.grad_fn is None):
        return (
            None  # a parameter exists anyway: only a computed weight (weight norm, a merged adapter) is worth dropping
        )
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


# ---- ops that need one bit an element ----


def signs(opened: Callable[[Tensor], Tensor], closed_value: float = 0.0, open_value: float = 1.0) -> PackOne:
    """Keep where the op lets the gradient through; get() gives a tensor whose elements fall on the same sides."""

    def pack(t: Tensor) -> Saved | None:
        if t.numel() < 8:
            return None
        return TwoValued(Mask.pack(opened(t.detach())), closed_value, open_value, t.dtype)

    return pack


def relu(call: Call) -> PackOne:
    """threshold_backward lets the gradient through unless result <= 0: a result is above 0, or NaN, if not 0."""
    return signs(lambda t: t.bool())


def leaky_relu(call: Call) -> PackOne:
    """leaky_relu_backward scales the gradient unless x > 0 (NaN is scaled)."""
    return signs(lambda t: t > 0)


def threshold(call: Call) -> PackOne:
    """F.threshold(input, threshold, value): the gradient passes unless x <= threshold (NaN passes)."""
    limit = call.get(1, "threshold")
    return signs(lambda t: (t <= limit).logical_not_(), limit, limit + max(1.0, abs(limit)))


def hardtanh(call: Call) -> PackOne:
    """F.hardtanh(input, min_val=-1, max_val=1): the gradient passes strictly inside (NaN passes)."""
    return _inside(call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0))


def relu6(call: Call) -> PackOne:
    """F.relu6(input): hardtanh between 0 and 6."""
    return _inside(0.0, 6.0)


def _inside(low: float, high: float) -> PackOne:
    return signs(lambda t: ((t <= low) | (t >= high)).logical_not_(), high, low / 2 + high / 2)


def prelu(call: Call) -> PackOne | None:
    """F.prelu(input, weight): a frozen slope needs x's sign only."""
    w = call.get(1, "weight")
    if needs(w):
        return None
    sign, shape_w = leaky_relu(call), w.shape
    return lambda t: None if t.shape == shape_w or t.numel() == shape_w.numel() else sign(t)


def dropout(call: Call) -> PackOne:
    """Boolean masks (CUDA) and floating noise of two values (CPU); the rest as it is."""
    return mask_of


def mask_of(t: Tensor) -> Saved | None:
    """The 1-bit form of a boolean or two-valued tensor that takes no gradient; None for any other."""
    if t.dtype == torch.bool:
        return PackedBool(Mask.pack(t.detach()))
    return scaled_mask(t) if t.is_floating_point() and not t.requires_grad else None


# ---- max-pool ----


@dataclass(frozen=True)
class Narrow:
    """Integers in a narrower type that holds them all."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def get(self) -> Tensor:
        """The tensor in the type it had."""
        return self.values.to(self.dtype)


def max_pool(spatial: int) -> Rule:
    """Its backward needs where each maximum lies in its plane of ``spatial`` axes; of the input, shape and layout."""

    def rule(call: Call) -> PackOne:
        largest = call.get(0, "input").shape[-spatial:].numel() - 1
        narrow = next(t for t in (torch.int8, torch.int16, torch.int32, torch.int64) if largest <= torch.iinfo(t).max)

        def pack(t: Tensor) -> Saved:
            return Dropped.of(t) if t.is_floating_point() else Narrow(t.detach().to(narrow), t.dtype)

        return pack

    return rule


# ---- the table ----

RELU_FAMILY: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, Tensor.relu, Tensor.relu_), relu),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), leaky_relu),
    **dict.fromkeys((F.threshold, torch.threshold, torch.threshold_), threshold),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), hardtanh),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), prelu),
    F.relu6: relu6,
}
DROPOUT: dict[Callable[..., Any], Rule] = dict.fromkeys(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout),
        F.multi_head_attention_forward,  # its inner calls are out of the mode's sight: its dropout is
    ),
    dropout,
)
MAX_POOL: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.max_pool1d, F.max_pool1d_with_indices, torch.max_pool1d), max_pool(1)),
    **dict.fromkeys((F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d), max_pool(2)),
    **dict.fromkeys((F.max_pool3d, F.max_pool3d_with_indices, torch.max_pool3d), max_pool(3)),
}
LINEAR_IN_WEIGHT: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), convolution),
    **dict.fromkeys((F.layer_norm, F.group_norm), layer_norm),
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}
MASKS = {**RELU_FAMILY, **DROPOUT}
EXACT = {**MASKS, **MAX_POOL, **LINEAR_IN_WEIGHT}
