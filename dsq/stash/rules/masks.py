"""Rules of operations that save a bit a value: ReLU, clamp, dropout. Gradients are exact."""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from dsq.kernels.dispatch import apply_mask, bernoulli_mask, scale_mask
from dsq.kernels.dispatch import relu as masked_relu
from dsq.stash.memory import MemoryOrder, place
from dsq.stash.rules.pointwise import overwrite
from dsq.stash.saved_forms import SavedForm, save, saved
from dsq.stash.stash import Stash


def relu(stash: Stash, input: Tensor, inplace: bool = False) -> Tensor:
    """Run F.relu, torch.relu and their forms in place."""
    if input.numel() == 0 or (inplace and (input.is_leaf or input._is_view())):
        return torch.relu_(input) if inplace else torch.relu(input)
    sources: list[SavedForm | None] = []
    y: Tensor = ReLU.apply(stash, input, inplace, sources)  # type: ignore[no-untyped-call]
    stash.register_recomputed(y, sources, lambda x, mask: x.relu() * mask)  # x in place is in its new version now
    return y


relu_in_place = partial(relu, inplace=True)


class ReLU(torch.autograd.Function):
    """``sources`` gets the forms that its result is recomputed from."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, in_place: bool, sources: list[SavedForm | None]) -> Tensor:
        source = stash.find(x)
        if in_place:
            ctx.mark_dirty(x)
        ctx.contiguous = x.is_contiguous()
        if ctx.contiguous:
            y, bits = masked_relu(x, in_place)
            mask = stash.packed_mask(bits, MemoryOrder.contiguous(y.shape), y.dtype)
        else:
            y = torch.relu_(x) if in_place else torch.relu(x)
            mask = stash.bitmask(y)
        save(ctx, mask)
        sources += source, mask
        return x if in_place else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        if ctx.contiguous and not torch.is_grad_enabled() and not is_legacy_batchedtensor(dy):
            return None, apply_mask(ctx.saved_tensors[0], dy), None, None
        (mask,) = saved(ctx)
        return None, torch.ops.aten.threshold_backward(dy, mask, 0), None, None


def clamp(stash: Stash, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Run torch.clamp between numbers: where it changed nothing."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        return torch.clamp(input, min, max)
    return Clamp.apply(stash, input, partial(torch.clamp, min=min, max=max))  # type: ignore[no-any-return, no-untyped-call]


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, run: Any) -> Tensor:
        y: Tensor = run(x)
        save(ctx, stash.bitmask(y == x))
        stash.register_recomputed(y, (stash.find(x),), run)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:
        (mask,) = saved(ctx)
        return None, torch.ops.aten.threshold_backward(dy, mask.to(dy.dtype), 0), None


def dropout(stash: Stash, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run F.dropout, with PyTorch's own random numbers."""
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    y = Dropout.apply(stash, input, float(p))  # type: ignore[no-untyped-call]
    return overwrite(stash, input, y) if inplace else y


def torch_dropout(stash: Stash, input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(stash, input, p, train)


def native_dropout(stash: Stash, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Run torch.native_dropout, of whose mask nobody asks for a gradient."""
    if not train or not 0 < p < 1:
        return torch.native_dropout(input, p, train)
    return Dropout.apply(stash, input, float(p), True)  # type: ignore[no-any-return, no-untyped-call]


@lru_cache
def _kept_factor(p: float, dtype: torch.dtype) -> float:
    """Return what values that dropout keeps are multiplied by, as PyTorch rounds it."""
    return torch.ones((), dtype=dtype).div_(1 - p).item()


class Dropout(torch.autograd.Function):
    """Return y, and with ``returns_mask`` whether each value was kept."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, p: float, returns_mask: bool = False) -> Any:
        _, order, values = place(x)  # PyTorch draws in the order in which the values lie in memory
        bits = None if returns_mask or values.numel() < x.numel() else bernoulli_mask(values, 1 - p)
        ctx.order = None if bits is None else order
        if bits is not None:
            y = order.owner(scale_mask(bits, values, _kept_factor(p, x.dtype)))
            mask = stash.packed_mask(bits, order, x.dtype)
        elif x.device.type == "cpu":  # as F.dropout draws there
            noise = torch.empty_like(x).bernoulli_(1 - p)
            was_kept = noise.bool() if returns_mask else noise
            mask = stash.bitmask(noise)
            y = noise.div_(1 - p).mul_(x)
        else:
            y, was_kept = torch.native_dropout(x, p, True)
            mask = stash.bitmask(was_kept)
        save(ctx, mask)
        stash.register_recomputed(y, (stash.find(x), mask), lambda x, mask: mask.to(x.dtype).div_(1 - p).mul_(x))
        ctx.p = p
        if not returns_mask:
            return y
        ctx.mark_non_differentiable(was_kept)
        return y, was_kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[None, Tensor, None, None]:
        if ctx.order is not None and not torch.is_grad_enabled() and not is_legacy_batchedtensor(dy):
            dy_values = dy.permute(ctx.order.axes)
            dx = scale_mask(ctx.saved_tensors[0], dy_values, _kept_factor(ctx.p, dy.dtype))
            return None, ctx.order.restore(dx), None, None
        (mask,) = saved(ctx)
        scaled = mask.to(dy.dtype).div_(1 - ctx.p)
        is_batched = is_legacy_batchedtensor(dy)  # gradients, of is_grads_batched=True
        return None, scaled * dy if is_batched else scaled.mul_(dy), None, None
