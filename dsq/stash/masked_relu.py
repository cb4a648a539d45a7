"""ReLU that makes its mask in the same pass, and whose backward reads the mask's bits: no tensor is made of them, and
less memory is read than by PyTorch's. Result and gradient are PyTorch's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from dsq.kernels import FLOATS, apply_mask, relu, unpack_mask
from dsq.stash.masks import Mask, TwoValued
from dsq.stash.saved import MemoryOrder

if TYPE_CHECKING:
    from dsq.stash.calls import Call, PackOne

_IN_PLACE = (torch.relu_, Tensor.relu_)  # F.relu_ is torch's
RELUS = frozenset((F.relu, torch.relu, Tensor.relu, *_IN_PLACE))


def stand_in(func: Callable[..., Any], call: Call) -> tuple[Callable[[], Tensor], PackOne] | None:
    """``func``, one of RELUS, by MaskedRelu, and what its result is kept as; None where PyTorch's own has to run."""
    x, in_place = call.get(0, "input"), func in _IN_PLACE or bool(call.get(1, "inplace", False))
    if not _applies(x, in_place):
        return None
    made: list[Mask] = []
    return partial(MaskedRelu.apply, x, in_place, made), lambda y: TwoValued(made.pop(), 0.0, 1.0, y.dtype)


def _applies(x: Any, in_place: bool) -> bool:
    ordinary = type(x) is Tensor and x.requires_grad and x.dtype in FLOATS and x.layout is torch.strided
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return ordinary and x.numel() > 0 and not transformed and not (in_place and (x.is_leaf or x._is_view()))


class MaskedRelu(torch.autograd.Function):
    """The saved-tensor hooks in force are given the result, and give back its mask's bits (uint8), or the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool, made: list[Mask]) -> Tensor:
        if x.is_contiguous():
            y, bits = relu(x, in_place)
            mask = Mask(bits, MemoryOrder.contiguous(y.shape))
        else:
            y = F.relu(x, in_place)
            mask = Mask.of(y)
        made.append(mask)
        if in_place:
            ctx.mark_dirty(x)
        ctx.order, ctx.stride = mask.order, y.stride()
        ctx.save_for_backward(y.detach())
        ctx.set_materialize_grads(False)  # no gradient stays no gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None]:
        if dy is None:
            return None, None, None
        (saved,) = ctx.saved_tensors
        if saved.dtype is torch.uint8:
            batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # is_grads_batched=True
            if dy.stride() == ctx.stride and not batched and not torch.is_grad_enabled():
                if dy.is_contiguous():
                    return apply_mask(saved, dy), None, None
                return ctx.order.restore(apply_mask(saved, ctx.order.flat(dy))), None, None
            saved = ctx.order.restore(unpack_mask(saved, dy.numel(), 0.0, 1.0, dy.dtype))
        return torch.ops.aten.threshold_backward(dy, saved, 0), None, None
