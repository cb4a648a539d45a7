"""Rules of operations that move values: pooling, padding, indexing. They save places, or nothing; gradients are exact.

An index is saved; the result is recomputed from the codes of the input. The messages of a graph network, x[source],
have a row for each edge. The product that weighs them would save them, while x, which is far smaller, is saved already.
The sum of the messages at each target, index_add, saves the index; PyTorch saves the messages too.
"""

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.rules.products import as_tuple
from dsq.stash.saved_forms import save, saved
from dsq.stash.stash import Stash

aten = torch.ops.aten
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
    defaults = _OPTIONS[kind]
    axes = max(2, dimensions)

    def run(stash: Stash, input: Tensor, kernel_size: Any, *args: Any, **keywords: Any) -> Any:
        options = {"kernel_size": kernel_size} | defaults | dict(zip(defaults, args, strict=False)) | keywords
        if options.pop("return_indices", False) or input.dim() != dimensions + 2:
            return function(input, kernel_size, *args, **keywords)
        for name, one in _BESIDE.items():
            if name in options:
                sizes = [] if options[name] is None else as_tuple(options[name], dimensions)
                options[name] = [one, *sizes] if dimensions == 1 and sizes else sizes
        x = input.unsqueeze(-2) if dimensions == 1 else input
        values = tuple(options.values())
        if kind == "max":
            y = MaxPool.apply(stash, x, axes, *values)  # type: ignore[no-untyped-call]
        else:
            functions = (getattr(aten, f"avg_pool{axes}d{suffix}") for suffix in ("", "_backward"))
            y = Shaped.apply(stash, x, *functions, values)  # type: ignore[no-untyped-call]
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
    return Shaped.apply(  # type: ignore[no-any-return, no-untyped-call]
        *(stash, input, aten._adaptive_avg_pool2d),
        lambda dy, x, size: aten._adaptive_avg_pool2d_backward(dy, x),
        (size,),
    )


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


def index_select(stash: Stash, input: Tensor, dim: int, index: Tensor) -> Tensor:
    y = torch.index_select(input, dim, index)
    _from_index(stash, y, input, index, lambda x, index: torch.index_select(x, dim, index))
    return y


def getitem(stash: Stash, input: Tensor, index: Any) -> Tensor:
    """Return x[index] by one tensor of places; other indices are views, or rare."""
    y: Tensor = input[index]
    if isinstance(index, Tensor) and index.dtype == torch.int64:
        _from_index(stash, y, input, index, lambda x, index: x[index])
    return y


def _from_index(stash: Stash, y: Tensor, x: Tensor, index: Tensor, make: Any) -> None:
    if x.requires_grad and x.is_floating_point() and x.dim() >= 2:
        source = stash.find(x)
        if source is not None:
            stash.register_recomputed(y, (source, stash.exact(index)), make)


def gather(stash: Stash, input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Run torch.gather, which saves the index alone. PyTorch saves the input too, for its shape."""
    if sparse_grad:
        return torch.gather(input, dim, index, sparse_grad=True)
    return Gather.apply(stash, input, dim, index)  # type: ignore[no-any-return, no-untyped-call]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, dim: int, index: Tensor) -> Tensor:
        save(ctx, stash.exact(index))
        ctx.dim, ctx.shape = dim, x.shape
        return torch.gather(x, dim, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = saved(ctx)
        return None, dy.new_zeros(ctx.shape).scatter_add_(ctx.dim, index, dy), None, None


def index_add(
    stash: Stash, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1, in_place: bool = False
) -> Tensor:
    """Run torch.index_add, and save the index alone."""
    if in_place and (input._is_view() or (input.is_leaf and input.requires_grad)):
        return input.index_add_(dim, index, source, alpha=alpha)
    if index.dim() == 0 or source.dim() == 0:
        run = Tensor.index_add_ if in_place else torch.index_add
        return run(input, dim, index, source, alpha=alpha)
    return IndexAdd.apply(stash, input, dim, index, source, alpha, in_place)  # type: ignore[no-any-return, no-untyped-call]


index_add_in_place = partial(index_add, in_place=True)


class IndexAdd(torch.autograd.Function):
    """Add ``source`` to those places of ``x`` along ``dim`` that ``index`` names."""

    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any, in_place: bool
    ) -> Tensor:
        save(ctx, stash.exact(index) if ctx.needs_input_grad[4] else None)
        ctx.dim, ctx.alpha = dim, alpha
        if in_place:
            ctx.mark_dirty(x)
            return x.index_add_(dim, index, source, alpha=alpha)
        return torch.index_add(x, dim, index, source, alpha=alpha)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = saved(ctx)
        dsource = None if index is None else dy.index_select(ctx.dim, index)
        if dsource is not None and ctx.alpha != 1:
            dsource = dsource * ctx.alpha
        return None, dy if ctx.needs_input_grad[1] else None, None, None, dsource, None, None
