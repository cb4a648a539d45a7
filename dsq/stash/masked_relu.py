"""ReLU whose backward reads the bits of its mask: no tensor is made of them, and less memory is read than by PyTorch's.

The forward is PyTorch's own; the gradient is threshold_backward's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from dsq.kernels import FLOATS, apply_mask, unpack_mask
from dsq.stash.saved import MemoryOrder

if TYPE_CHECKING:
    from dsq.stash.calls import Call

_IN_PLACE = (torch.relu_, Tensor.relu_)  # F.relu_ is torch's
RELUS = (F.relu, torch.relu, Tensor.relu, *_IN_PLACE)


def stand_in(func: Callable[..., Any], call: Call) -> Callable[[], Tensor] | None:
    """The call of a ReLU by MaskedRelu; None where ``func`` is no ReLU, or PyTorch's own has to run."""
    if func not in RELUS:
        return None
    x, in_place = call.get(0, "input"), func in _IN_PLACE or bool(call.get(1, "inplace", False))
    return partial(MaskedRelu.apply, x, in_place) if _applies(x, in_place) else None


def _applies(x: Any, in_place: bool) -> bool:
    ordinary = type(x) is Tensor and x.requires_grad and x.dtype in FLOATS and x.layout is torch.strided
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return ordinary and not transformed and not (in_place and (x.is_leaf or x._is_view()))


class MaskedRelu(torch.autograd.Function):
    """The saved-tensor hooks in force are given the result, and give back its mask's bits (uint8), or the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        y = F.relu(x, in_place)
        if in_place:
            ctx.mark_dirty(x)
        ctx.order, ctx.stride = MemoryOrder.of(y)[0], y.stride()
        ctx.save_for_backward(y.detach())
        ctx.set_materialize_grads(False)  # no gradient stays no gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return None, None
        (saved,) = ctx.saved_tensors
        if saved.dtype is torch.uint8:
            batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # is_grads_batched=True
            if dy.stride() == ctx.stride and not batched and not torch.is_grad_enabled():
                return ctx.order.restore(apply_mask(saved, ctx.order.flat(dy))), None
            saved = ctx.order.restore(unpack_mask(saved, dy.numel(), 0.0, 1.0, dy.dtype))
        return torch.ops.aten.threshold_backward(dy, saved, 0), None
