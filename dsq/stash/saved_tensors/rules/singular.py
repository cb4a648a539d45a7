"""Rules of the ops whose backward compares what was saved, or divides by it: of rounded values its result would be
zero, infinite or NaN. That is kept exact; what else they save is the policy's.
"""

from collections.abc import Callable, Iterator
from math import inf, prod
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


def reduction(call: Call) -> PackOne:
    """A deviation, a norm, a distance or a similarity of rows: by what it made of each row, far fewer values."""
    shapes = [x.shape for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    return _fewer_than(max(map(prod, shapes)))


def similarity(call: Call) -> PackOne:
    """F.cosine_similarity(x1, x2): the same, of pairs of rows."""
    return _fewer_than(prod(torch.broadcast_shapes(call.get(0, "x1").shape, call.get(1, "x2").shape)))


def _fewer_than(count: int) -> PackOne:
    def pack(t: Tensor) -> Saved | None:
        values = prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)  # but for expanded ones
        return Kept.of(t) if values < count else None

    return pack


def norm(call: Call) -> PackOne:
    """A norm of rows. Of an order under 2 its gradient is a sign or more, and of order inf an extremum's."""
    order = call.get(1, "p", call.kwargs.get("ord"))
    singular = isinstance(order, (int, float)) and (order < 2 or order == inf)
    return Kept.of if singular else reduction(call)


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


def sampling(call: Call) -> PackOne:
    """F.grid_sample(input, grid): where in the input a value was taken, which no rounded place tells."""
    shape = call.get(1, "grid").shape
    return lambda t: Kept.of(t) if t.shape == shape else None


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
    **dict.fromkeys(_spellings("amax", "amin", "aminmax", "scatter_reduce", "index_reduce", "segment_reduce"), whole),
    **dict.fromkeys(_spellings("max", "min", "median", "nanmedian"), extremum),
    **dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm, F.normalize, *_spellings("norm")), norm),
    **dict.fromkeys((F.pairwise_distance, F.cosine_embedding_loss, F.triplet_margin_loss), reduction),
    **dict.fromkeys(_spellings("std", "std_mean"), reduction),
    F.cosine_similarity: similarity,  # torch's too
    F.grid_sample: sampling,
    **dict.fromkeys(_spellings("div", "divide", "true_divide", "truediv"), division),
    **dict.fromkeys(_spellings("pow", "float_power"), power),
    **dict.fromkeys(_spellings("sqrt", "hypot", "atan2", "arctan2", "addcdiv"), whole),
    **dict.fromkeys(_spellings("log", "log2", "log10", "log1p", "logit", "xlogy", "xlog1py", "entr"), whole),
    **dict.fromkeys(_spellings("asin", "arcsin", "acos", "arccos", "acosh", "arccosh", "atanh", "arctanh"), whole),
    **dict.fromkeys(_spellings("lgamma", "gammaln", "mvlgamma", "digamma", "psi", "polygamma", "erfinv"), whole),
    **dict.fromkeys(_spellings("ndtri", "log_ndtr", "fmod", "remainder", "mod", "copysign"), whole),
    **dict.fromkeys(_spellings("prod", "cumprod", "logcumsumexp"), whole),
    **dict.fromkeys((torch.cdist, F.pdist, F.local_response_norm), whole),
    **dict.fromkeys((F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.lp_pool1d), whole),
    **dict.fromkeys((F.lp_pool2d, F.lp_pool3d), whole),
    **dict.fromkeys((F.l1_loss, *_spellings("abs", "absolute")), absolute),
}
