"""Rules of the ops that need a bit an element, a narrow integer, or nothing: ReLU family, dropout, masks, pooling."""

from math import inf, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.masks import Mask, TwoValued, one_bit
from dsq.stash.selective.forms import Dropped, Narrow, Saved
from dsq.stash.selective.function_mode import Call, PackOne, Replacement, Rule, RuleTable, needs
from dsq.stash.selective.masked_relu import RELUS, masked_relu


def sides(closed: float = 0.0, open: float = 1.0, **limits: Any) -> PackOne:
    """Keep where the op lets the gradient through: between the limits (of Mask.of). get() gives values that fall on the
    same sides, ``open`` and ``closed``.
    """

    def pack(t: Tensor) -> Saved | None:
        return None if t.numel() < 8 else TwoValued(Mask.of(t, **limits), closed, open, t.dtype)

    return pack


def relu(call: Call) -> PackOne | Replacement:
    """threshold_backward lets the gradient through unless result <= 0 (NaN passes)."""
    return masked_relu(call) or sides()


def leaky_relu(call: Call) -> PackOne:
    """leaky_relu_backward scales the gradient unless x > 0 (NaN is scaled)."""
    return sides(nan_is_open=False)


def threshold(call: Call) -> PackOne:
    """F.threshold(input, threshold, value): the gradient passes unless x <= threshold (NaN passes)."""
    limit = call.get(1, "threshold")

    def pack(t: Tensor) -> Saved | None:
        # CUDA compares in the type of x, the CPU in float32
        low = limit if t.device.type == "cpu" else torch.tensor(limit, dtype=t.dtype, device="cpu").item()
        return sides(closed=-inf, open=nan, low=low)(t)

    return pack


def hardtanh(call: Call) -> PackOne:
    """F.hardtanh(input, min_val=-1, max_val=1): the gradient passes strictly inside."""
    return _inside(call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0))


def relu6(call: Call) -> PackOne:
    """F.relu6(input): hardtanh between 0 and 6."""
    return _inside(0.0, 6.0)


def _inside(low: float, high: float) -> PackOne:
    def pack(t: Tensor) -> Saved | None:
        # a NaN passes on CUDA; on a CPU not, but for those that fill no vector
        nan_is_open = t.device.type != "cpu"
        return sides(closed=inf, open=_middle(low, high, t.dtype), low=low, high=high, nan_is_open=nan_is_open)(t)

    return pack


def _middle(low: float, high: float, dtype: torch.dtype) -> float:
    largest = torch.finfo(dtype).max
    return max(low, -largest) / 2 + min(high, largest) / 2


def clamp(call: Call) -> PackOne | None:
    """torch.clamp(input, min=None, max=None) by numbers: the gradient passes where min <= x <= max (NaN is stopped)."""
    return _between(call.get(1, "min"), call.get(2, "max"))


def clamp_min(call: Call) -> PackOne | None:
    """torch.clamp_min(input, min)."""
    return _between(call.get(1, "min"), None)


def clamp_max(call: Call) -> PackOne | None:
    """torch.clamp_max(input, max)."""
    return _between(None, call.get(1, "max"))


def _between(low: Any, high: Any) -> PackOne | None:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return None
    low, high = -inf if low is None else low, inf if high is None else high

    def pack(t: Tensor) -> Saved | None:
        if not t.is_floating_point():
            return None
        x = t.detach()
        return TwoValued(Mask.of((x >= low) & (x <= high)), nan, _middle(low, high, t.dtype), t.dtype)

    return pack


def prelu(call: Call) -> PackOne | None:
    """F.prelu(input, weight): a frozen slope needs x's sign only."""
    w = call.get(1, "weight")
    if needs(w):
        return None
    sign, shape_w = leaky_relu(call), w.shape
    return lambda t: None if t.shape == shape_w or t.numel() == shape_w.numel() else sign(t)


def two_values(call: Call) -> PackOne:
    """Dropout's boolean masks (CUDA) and floating noise (CPU), and what is added to scores; the rest as it is."""
    return lambda t: None if t.requires_grad else one_bit(t)


def max_pool(spatial: int) -> Rule:
    """Its backward needs where each maximum lies in its plane of ``spatial`` axes; of the input, shape and layout."""

    def rule(call: Call) -> PackOne:
        largest = call.get(0, "input").shape[-spatial:].numel() - 1
        narrow = next(t for t in (torch.int8, torch.int16, torch.int32, torch.int64) if largest <= torch.iinfo(t).max)

        def pack(t: Tensor) -> Saved:
            return Dropped.of(t) if t.is_floating_point() else Narrow(t.detach().to(narrow), t.dtype)

        return pack

    return rule


def average_pool(call: Call) -> PackOne:
    """Its backward needs the input's shape and layout."""
    return Dropped.of


RELU_FAMILY: RuleTable = {
    **dict.fromkeys(RELUS, relu),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), leaky_relu),
    **dict.fromkeys((F.threshold, torch.threshold, torch.threshold_), threshold),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), hardtanh),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), prelu),
    F.relu6: relu6,
    **dict.fromkeys((torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_), clamp),
    **dict.fromkeys((torch.clip, torch.clip_, Tensor.clip, Tensor.clip_), clamp),
    **dict.fromkeys((torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_), clamp_min),
    **dict.fromkeys((torch.clamp_max, torch.clamp_max_, Tensor.clamp_max, Tensor.clamp_max_), clamp_max),
}
MASKS: RuleTable = dict.fromkeys(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.native_dropout, torch.alpha_dropout, torch.feature_dropout),
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,  # its inner calls are out of the mode's sight
    ),
    two_values,
)
POOLING: RuleTable = {
    **dict.fromkeys((F.max_pool1d, F.max_pool1d_with_indices, torch.max_pool1d), max_pool(1)),
    **dict.fromkeys((F.max_pool2d, F.max_pool2d_with_indices, torch.max_pool2d), max_pool(2)),
    **dict.fromkeys((F.max_pool3d, F.max_pool3d_with_indices, torch.max_pool3d), max_pool(3)),
    **dict.fromkeys(
        (
            *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
            *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        ),
        average_pool,
    ),
}
FEW_BITS = {**RELU_FAMILY, **MASKS, **POOLING}
