"""ReLU that makes its mask in the same pass, and whose backward reads the mask's bits: no tensor is made of them, and
less memory is read than by PyTorch's. Result and gradient are PyTorch's, bit for bit.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.kernels.backend import FLOATS
from dsq.kernels.dispatch import apply_mask, relu, unpack_mask
from dsq.stash.masks import Mask, TwoValued
from dsq.stash.memory_order import MemoryOrder
from dsq.stash.selective.function_mode import Call, Replacement

_IN_PLACE = (torch.relu_, Tensor.relu_)  # F.relu_ is torch's
RELUS = frozenset((F.relu, torch.relu, Tensor.relu, *_IN_PLACE))


def masked_relu(call: Call) -> Replacement | None:
    """A call of one of RELUS by MaskedRelu; None where PyTorch's own has to run."""
    x, in_place = call.get(0, "input"), call.func in _IN_PLACE or bool(call.get(1, "inplace", False))
    if call.decided_further_out() or not _applies(x, in_place):
        return None
    made: list[Mask] = []
    run = partial(MaskedRelu.apply, x, in_place, made)
    return Replacement(run, lambda y: TwoValued(made.pop(), 0.0, 1.0, y.dtype), bits_or_tensor)


def _applies(x: Any, in_place: bool) -> bool:
    ordinary = type(x) is Tensor and x.requires_grad and x.dtype in FLOATS and x.layout is torch.strided
    return ordinary and x.numel() > 0 and not (in_place and (x.is_leaf or x._is_view()))


def bits_or_tensor(saved: Any) -> Tensor:
    """What is kept of the result: the bits of its mask, if that is all, or the tensor."""
    bits = getattr(saved, "mask_bits", None)
    kept: Tensor = saved.get() if bits is None else bits
    return kept


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
            if dy.stride() == ctx.stride and not torch.is_grad_enabled():
                if dy.is_contiguous():
                    return apply_mask(saved, dy), None, None
                return ctx.order.restore(apply_mask(saved, ctx.order.flat(dy))), None, None
            saved = ctx.order.restore(unpack_mask(saved, dy.numel(), 0.0, 1.0, dy.dtype))
        dx: Tensor = torch.ops.aten.threshold_backward(dy, saved, 0)
        return dx, None, None
