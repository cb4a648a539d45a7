"""Rules of the ops whose backward compares what was saved, or divides by it: of rounded values its result would be
zero, infinite or NaN. That is kept exact; what else they save is the policy's.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

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


def _spellings(*names: str) -> Iterator[Callable[..., Any]]:
    """The ops of these names: functions, methods, and those that work in place."""
    for name in names:
        for place in (torch, Tensor, torch.special):
            for spelling in (name, f"{name}_", f"__{name}__", f"__i{name}__"):
                if hasattr(place, spelling):
                    yield getattr(place, spelling)


SINGULAR: RuleTable = {
    **dict.fromkeys(_spellings("amax", "amin", "aminmax"), whole),
    **dict.fromkeys(_spellings("max", "min"), extremum),
    **dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm, *_spellings("norm")), norm),
    **dict.fromkeys(_spellings("div", "divide", "true_divide", "truediv"), division),
    **dict.fromkeys(_spellings("pow", "float_power"), power),
    **dict.fromkeys(_spellings("sqrt", "hypot", "atan2", "arctan2", "addcdiv"), whole),
    **dict.fromkeys(_spellings("log", "log2", "log10", "log1p", "logit", "xlogy", "xlog1py", "entr"), whole),
    **dict.fromkeys(_spellings("asin", "arcsin", "acos", "arccos", "acosh", "arccosh", "atanh", "arctanh"), whole),
    **dict.fromkeys((F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.lp_pool1d), whole),
    **dict.fromkeys((F.lp_pool2d, F.lp_pool3d), whole),
    **dict.fromkeys((F.l1_loss, *_spellings("abs", "absolute")), absolute),
}
