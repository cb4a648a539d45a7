"""Rules of the ops whose backward compares what was saved, or divides by it: of rounded values its result would be
zero, infinite or NaN. That is kept exact; what else they save is the policy's.
"""

from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.saved_tensors.forms import Kept, Saved
from dsq.stash.saved_tensors.masks import Mask, TwoValued
from dsq.stash.saved_tensors.rules.function_mode import Call, PackOne, RuleTable


def whole(call: Call) -> PackOne:
    """All that the op saves."""
    return Kept.of


def extremum(call: Call) -> PackOne | None:
    """torch.max(input): the gradient goes to the values that equal the result. Along an axis it goes by an index."""
    return None if len(call.args) + len(call.kwargs) > 1 else Kept.of


def norm(call: Call) -> PackOne | None:
    """A norm of order inf is an extremum."""
    numbers = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, (int, float))]
    return Kept.of if any(abs(x) == inf for x in numbers) else None


def division(call: Call) -> PackOne | None:
    """torch.div(input, other): by ``other``."""
    other = call.get(1, "other")
    if not isinstance(other, Tensor):
        return None

    def pack(t: Tensor) -> Saved | None:
        return Kept.of(t) if t.shape == other.shape and t.data_ptr() == other.data_ptr() else None

    return pack


def power(call: Call) -> PackOne | None:
    """torch.pow(input, exponent): by ``input``, where the exponent is under 1 or may be."""
    exponent = call.get(1, "exponent")
    return None if isinstance(exponent, (int, float)) and exponent >= 1 else Kept.of


def absolute(call: Call) -> PackOne:
    """The sign of the input, in a bit a value; of one that is 0 here or there all of it."""

    def pack(t: Tensor) -> Saved | None:
        if t.is_floating_point() and bool(t.detach().all()):
            return TwoValued(Mask.of(t), -1.0, 1.0, t.dtype)
        return Kept.of(t)

    return pack


SINGULAR: RuleTable = {
    **dict.fromkeys((torch.amax, Tensor.amax, torch.amin, Tensor.amin, torch.aminmax, Tensor.aminmax), whole),
    **dict.fromkeys((torch.max, Tensor.max, torch.min, Tensor.min), extremum),
    **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), norm),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), division),
    **dict.fromkeys((Tensor.div, Tensor.div_, Tensor.divide, Tensor.true_divide), division),
    **dict.fromkeys((Tensor.__truediv__, Tensor.__itruediv__), division),
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.pow_, Tensor.__pow__, Tensor.__ipow__, torch.float_power), power),
    **dict.fromkeys((torch.sqrt, Tensor.sqrt, Tensor.sqrt_, torch.hypot, torch.atan2, Tensor.atan2), whole),
    **dict.fromkeys((torch.log, Tensor.log, torch.log2, Tensor.log2, torch.log10, torch.log1p, Tensor.log1p), whole),
    **dict.fromkeys((torch.logit, Tensor.logit, torch.asin, torch.acos, torch.atanh), whole),
    **dict.fromkeys((torch.xlogy, torch.addcdiv), whole),
    **dict.fromkeys((torch.abs, Tensor.abs, Tensor.__abs__, F.l1_loss), absolute),
}
