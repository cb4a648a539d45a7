"""Rules of operations that save a bit a value or less: ReLU, clamp, dropout, pooling, padding. Gradients are exact."""

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from dsq.kernels.dispatch import apply_mask
from dsq.kernels.dispatch import relu as masked_relu
from dsq.stash.memory import MemoryOrder
from dsq.stash.rules.pointwise import overwrite
from dsq.stash.rules.products import as_tuple
from dsq.stash.saved_forms import SavedForm
from dsq.stash.saving import save, saved
from dsq.stash.stash import Stash

aten = torch.ops.aten


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
        return None, aten.threshold_backward(dy, mask, 0), None, None


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
        return None, aten.threshold_backward(dy, mask.to(dy.dtype), 0), None


def dropout(stash: Stash, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run F.dropout, with PyTorch's own random numbers."""
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    y = Dropout.apply(stash, input, p)  # type: ignore[no-untyped-call]
    return overwrite(stash, input, y) if inplace else y


def torch_dropout(stash: Stash, input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(stash, input, p, train)


def native_dropout(stash: Stash, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Run torch.native_dropout, of whose mask nobody asks for a gradient."""
    if not train or not 0 < p < 1:
        return torch.native_dropout(input, p, train)
    return Dropout.apply(stash, input, p, True)  # type: ignore[no-any-return, no-untyped-call]


class Dropout(torch.autograd.Function):
    """Return y, and with ``returns_mask`` whether each value was kept."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, p: float, returns_mask: bool = False) -> Any:
        if x.device.type == "cpu":  # as F.dropout draws there
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
        (mask,) = saved(ctx)
        scaled = mask.to(dy.dtype).div_(1 - ctx.p)
        several = is_legacy_batchedtensor(dy)  # gradients, of is_grads_batched=True
        return None, scaled * dy if several else scaled.mul_(dy), None, None


#: what a pool over one axis has along an axis of one place beside it
_BESIDE = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
_OPTIONS = {  # in PyTorch's order
    "max": {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    "avg": {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None},
}


def pool(kind: str, dimensions: int) -> Any:
    """Return the rule of F.max_pool{1,2,3}d, or of F.avg_pool{1,2,3}d. A pool over one axis is one over two, as in
    PyTorch."""
    function = getattr(F, f"{kind}_pool{dimensions}d")
    usual = _OPTIONS[kind]
    axes = max(2, dimensions)

    def run(stash: Stash, input: Tensor, kernel_size: Any, *rest: Any, **named: Any) -> Any:
        options = {"kernel_size": kernel_size} | usual | dict(zip(usual, rest, strict=False)) | named
        if options.pop("return_indices", False) or input.dim() != dimensions + 2:
            return function(input, kernel_size, *rest, **named)
        for name, one in _BESIDE.items():
            if name in options:
                sizes = [] if options[name] is None else as_tuple(options[name], dimensions)
                options[name] = [one, *sizes] if dimensions == 1 and sizes else sizes
        x = input.unsqueeze(-2) if dimensions == 1 else input
        values = tuple(options.values())
        if kind == "max":
            y = MaxPool.apply(stash, x, axes, *values)  # type: ignore[no-untyped-call]
        else:
            names = f"avg_pool{axes}d", f"avg_pool{axes}d_backward"
            y = Shaped.apply(stash, x, *(getattr(aten, name) for name in names), values)  # type: ignore[no-untyped-call]
        return y.squeeze(-2) if dimensions == 1 else y

    return run


POOLS: dict[Any, Any] = {
    getattr(place, f"{kind}_pool{dimensions}d"): pool(kind, dimensions)
    for kind, dimensions, place in itertools.product(_OPTIONS, (1, 2, 3), (F, torch))
    if hasattr(place, f"{kind}_pool{dimensions}d")
}


class MaxPool(torch.autograd.Function):
    """Keeps the places of the largest values, in the narrowest integers."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, axes: int, *options: Any) -> Tensor:
        y, places = getattr(aten, f"max_pool{axes}d_with_indices")(x, *options)
        narrow = torch.int16 if x.shape[2:].numel() < 2**15 else torch.int32
        save(ctx, stash.exact(places.to(narrow)))
        ctx.axes, ctx.options, ctx.shape = axes, options, x.shape
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = saved(ctx)
        unread = dy.new_empty(1).expand(ctx.shape)
        backward = getattr(aten, f"max_pool{ctx.axes}d_with_indices_backward")
        return None, backward(dy, unread, *ctx.options, places.long()), None, *[None] * 5


def adaptive_avg_pool2d(stash: Stash, input: Tensor, output_size: Any) -> Tensor:
    """Run F.adaptive_avg_pool2d: nothing but the shape of x."""
    size = [output_size] * 2 if isinstance(output_size, int) else list(output_size)
    size = [input_size if output is None else output for input_size, output in zip(input.shape[-2:], size, strict=True)]
    if input.dim() != 4 or size == [1, 1]:  # which PyTorch computes as a mean, which saves nothing
        return F.adaptive_avg_pool2d(input, output_size)
    gradient = lambda dy, x, size: aten._adaptive_avg_pool2d_backward(dy, x)  # noqa: E731
    return Shaped.apply(stash, input, aten._adaptive_avg_pool2d, gradient, (size,))  # type: ignore[no-any-return, no-untyped-call]


def pad(stash: Stash, input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Run F.pad by values of x, as convolutions of audio and of style transfer do: nothing but the shape of x."""
    name = {"reflect": "reflection", "replicate": "replication"}.get(mode)
    dimensions = len(pad) // 2
    if name is None or input.dim() != dimensions + 2:
        return F.pad(input, pad, mode, value)
    run, gradient = (getattr(aten, f"{name}_pad{dimensions}d{suffix}") for suffix in ("", "_backward"))
    return Shaped.apply(stash, input, run, gradient, (list(pad),))  # type: ignore[no-any-return, no-untyped-call]


class Shaped(torch.autograd.Function):
    """An operation whose gradient reads the shape of x alone."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, function: Any, gradient: Any, options: tuple[Any, ...]) -> Tensor:
        ctx.shape, ctx.gradient, ctx.options = x.shape, gradient, options
        return function(x, *options)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.gradient(dy.contiguous(), dy.new_empty(ctx.shape), *ctx.options), None, None, None
