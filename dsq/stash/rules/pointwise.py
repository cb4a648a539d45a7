"""Rows of the activations, of products value by value, and of operations that move values.

An activation keeps its input; what it makes, which the next linear layer would keep, is made again from that. A product
keeps both factors and gives its result again: a gated unit keeps its two inputs and nothing else. A factor that is
broadcast (a row's 1 / deviation in an RMS norm that is written out) stays exact: it is small, and every value of the
row is multiplied by it.

A loss that a model writes out stays as exact as PyTorch's losses, which have no row: a residual against data, what is
divided, and exponentials (dsq/stash/stash.py). In codes of 4 bits the residual of the component that fits a point was 0
beside those that do not, and a mixture of Gaussians (y - mean) exp(-s) shrank its deviations without end.

What moves values keeps an index, and gives its result again from a code of the input. A message of a graph network,
x[source], is as long as the edges are many: the product that weighs it would keep it, and x, which is far smaller, is
kept already. The sum of the messages at each target, index_add, keeps the index; PyTorch keeps the messages too.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.functions import reusable_buffers, save, saved
from dsq.stash.rules.norms import channels
from dsq.stash.stash import Stash

aten = torch.ops.aten
#: an input at which what saturates has all but the gradient of an infinite one: 1e-7 of a sigmoid, 0 of a tanh
SATURATED = 16.0


def activation(
    function: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    infinity: float | None = None,
    limits: Callable[..., tuple[float, float]] | None = None,
    saves_result: bool = False,
    **options: Any,
) -> Any:
    """Return the row of an activation. backward: (dy, x, options) -> dx; infinity: what stands for infinite inputs, at
    which the function is finite; options: by name, in PyTorch's order, at their defaults. limits: of the options, where
    the backward is to get whether x lies between them, as 1 and 0. saves_result: PyTorch saves the result, and x may be
    overwritten: an x that stays exact is left to PyTorch."""
    usual = partial(function, **options), partial(backward, **options)
    prepare = None if infinity is None else partial(_bounded, infinity=infinity)
    writes = isinstance(backward, torch._ops.OpOverloadPacket) and "grad_input" in backward.overloads()

    def activate(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
        run, gradient = usual
        if args or named:
            given = options | dict(zip((*options, "inplace"), args, strict=False)) | named
            if given.pop("inplace", False):
                # before the values change, and held until they have
                form = stash.code(input, "activation", prepare) if limits is None else None
                if isinstance(form, Tensor):
                    return function(input, *args, **named)
                return in_place(stash, input, activate(stash, input, **given))
            run, gradient = partial(function, **given), partial(backward, **given)
        if saves_result and isinstance(stash.code(input, "activation", prepare), Tensor):
            y = run(input)
            stash.leave_exact(y)
            return y
        between = None if limits is None else limits(**run.keywords)
        return Activation.apply(stash, input, run, gradient, between, writes, prepare)  # type: ignore[no-any-return, no-untyped-call]

    return activate


def _bounded(values: Tensor, infinity: float) -> Tensor:
    """Return ``values`` with ``infinity`` for infinite ones, which no code has."""
    quick_to_ask = values.device.type == "cpu" and not torch.compiler.is_compiling()
    if quick_to_ask and math.isfinite(values.sum()):
        return values
    return values.nan_to_num(math.nan, infinity, -infinity)


def in_place(stash: Stash, x: Tensor, y: Tensor) -> Tensor:
    """Put ``y``, which a row made of ``x`` and whose gradient does not read ``x`` itself, in the place of ``x``."""
    form = stash.find(y)
    x.copy_(y)
    stash.recompute(x, (form,), lambda same: same)
    return x


class Activation(torch.autograd.Function):
    """y = run(x). Its gradient is made of dy and x; where limits are given, of dy and whether x lies between them, as 1
    and 0. ``writes``: its function takes a tensor to write to, ``grad_input``."""

    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, run: Any, gradient: Any, limits: Any, writes: bool, prepare: Any
    ) -> Tensor:
        y: Tensor = run(x)
        source = stash.code(x, "activation", prepare) if limits is None else stash.find(x)
        save(ctx, source if limits is None else stash.bitmask(x, limits[0], limits[1], nan_is_open=False))
        stash.recompute(y, (source,), run)
        ctx.gradient, ctx.writes = gradient, writes
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved(ctx)
        (over,) = reusable_buffers(ctx, dy, x)
        if over is not None and ctx.writes and (dy.dtype, dy.shape) == (x.dtype, x.shape):
            return None, ctx.gradient(dy, x, grad_input=over), *[None] * 5
        return None, ctx.gradient(dy, x.to(dy.dtype)), *[None] * 5


tanh = activation(torch.tanh, lambda dy, x: aten.tanh_backward(dy, x.tanh()), SATURATED, saves_result=True)
sigmoid = activation(torch.sigmoid, lambda dy, x: aten.sigmoid_backward(dy, x.sigmoid()), SATURATED, saves_result=True)
square = activation(torch.square, lambda dy, x: 2 * dy * x)
cube = activation(partial(torch.pow, exponent=3), lambda dy, x: 3 * dy * x * x)
ACTIVATIONS: dict[Any, Any] = {
    F.gelu: activation(F.gelu, aten.gelu_backward, approximate="none"),
    F.silu: activation(F.silu, aten.silu_backward),
    F.mish: activation(F.mish, aten.mish_backward),
    F.hardswish: activation(F.hardswish, aten.hardswish_backward),
    F.elu: activation(
        F.elu, lambda dy, x, alpha: aten.elu_backward(dy, alpha, 1.0, 1.0, False, x), SATURATED, alpha=1.0
    ),
    F.selu: activation(
        F.selu, lambda dy, x: aten.elu_backward(dy, 1.6732632423543772, 1.0507009873554805, 1.0, False, x), SATURATED
    ),
    F.softplus: activation(F.softplus, aten.softplus_backward, SATURATED, beta=1.0, threshold=20.0),
    F.leaky_relu: activation(
        F.leaky_relu,
        lambda dy, mask, negative_slope: dy * (mask + (1 - mask) * negative_slope),
        limits=lambda negative_slope: (0.0, math.nan),
        negative_slope=0.01,
    ),
    F.relu6: activation(F.relu6, torch.mul, limits=lambda: (0.0, 6.0)),
    F.hardtanh: activation(
        F.hardtanh,
        lambda dy, mask, **_: dy * mask,
        limits=lambda min_val, max_val: (min_val, max_val),
        min_val=-1.0,
        max_val=1.0,
    ),
    F.glu: activation(F.glu, aten.glu_backward, dim=-1),  # a product of one half and a sigmoid of the other
    **dict.fromkeys((F.tanh, torch.tanh, Tensor.tanh), tanh),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), sigmoid),
    **dict.fromkeys((torch.square, Tensor.square), square),
}


def prelu(stash: Stash, input: Tensor, weight: Tensor) -> Tensor:
    return PReLU.apply(stash, input, weight)  # type: ignore[no-any-return, no-untyped-call]


class PReLU(torch.autograd.Function):
    """Keeps the sign of x, a bit a value, exact: a small x that is rounded to 0 would take the other slope."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, weight: Tensor) -> Tensor:
        y = F.prelu(x, weight)
        weight_wanted = ctx.needs_input_grad[2]
        form = stash.code(x, "activation") if weight_wanted else stash.find(x)
        save(ctx, stash.bitmask(x, nan_is_open=False), form if weight_wanted else None, weight)
        stash.recompute(y, (form, weight), lambda x, weight: F.prelu(x, weight.to(x.dtype)))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mask, x, weight = saved(ctx)
        below, slopes = dy * (1 - mask), channels(weight, dy)
        dw = None if x is None else (below * x).sum_to_size(slopes.shape).view(weight.shape)
        return None, dy * mask + below * slopes, dw


def mul(stash: Stash, input: Any, other: Any) -> Tensor:
    """Run torch.mul of two tensors of which at least one wants a gradient."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.mul(input, other)
    if not input.is_floating_point() or not other.is_floating_point():
        return torch.mul(input, other)
    return Mul.apply(stash, input, other, None, 1)  # type: ignore[no-any-return, no-untyped-call]


def addcmul(stash: Stash, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """Run torch.addcmul, as ConvNeXt V2 scales what it normalizes by."""
    if not all(x.is_floating_point() for x in (input, tensor1, tensor2)):
        return torch.addcmul(input, tensor1, tensor2, value=value)
    return Mul.apply(stash, tensor1, tensor2, input, value)  # type: ignore[no-any-return, no-untyped-call]


class Mul(torch.autograd.Function):
    """The product of ``a`` and ``b``; with ``plus``, that and ``value`` times the product."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, a: Tensor, b: Tensor, plus: Tensor | None, value: float) -> Tensor:
        y = torch.mul(a, b) if plus is None else torch.addcmul(plus, a, b, value=value)
        a_wanted, b_wanted = ctx.needs_input_grad[1:3]
        a_form = stash.factor(a, "factor", b_wanted, exact=a.shape != y.shape)
        forms = a_form, stash.factor(b, "factor", a_wanted, exact=b.shape != y.shape)
        save(ctx, *forms)
        if plus is None:
            stash.recompute(y, forms, torch.mul)
        ctx.shapes, ctx.value = [None if x is None else x.shape for x in (a, b, plus)], value
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved(ctx)
        dplus = dy.sum_to_size(ctx.shapes[2]) if ctx.needs_input_grad[3] else None
        dy = dy if ctx.value == 1 else dy * ctx.value
        over_a, over_b = (x if x is not None and x.dtype == dy.dtype else None for x in reusable_buffers(ctx, dy, a, b))
        da = None if b is None else torch.mul(dy, b, out=over_b).sum_to_size(ctx.shapes[0])
        db = None if a is None else torch.mul(dy, a, out=over_a).sum_to_size(ctx.shapes[1])
        return None, da, db, dplus, None


def sub(stash: Stash, input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    """Run torch.sub. The difference to a tensor without a gradient is a loss's residual: whoever keeps it keeps it
    exact."""
    y = torch.sub(input, other, alpha=alpha)
    if isinstance(input, Tensor) and isinstance(other, Tensor) and input.requires_grad != other.requires_grad:
        stash.leave_exact(y)
    return y


def rsub(stash: Stash, input: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """Run torch.rsub: 1 - z, as in z h + (1 - z) x, made again where z is, of what its sigmoid keeps. Codes of a z near
    1 would not say how near."""
    y = torch.rsub(input, other, alpha=alpha)
    if not isinstance(other, Tensor):
        stash.recompute(y, (stash.find_recomputed(input),), lambda z: torch.rsub(z, other, alpha=alpha))
    return y


def outer(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Make the row of a function whose result may be much larger than all it is made of, as a learned bias of all
    sequences under the mask of each. Such a result is made again."""

    def row(stash: Stash, *args: Any, **named: Any) -> Any:
        y = function(*args, **named)
        places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        # torch.where of a condition alone returns places
        if not named and isinstance(y, Tensor) and y.numel() >= 2 * sum(args[place].numel() for place in places):
            others = [None if isinstance(x, Tensor) else x for x in args]

            def again(*values: Tensor) -> Tensor:
                tensors = dict(zip(places, values, strict=True))
                return function(*(tensors.get(place, other) for place, other in enumerate(others)))

            stash.recompute(y, [stash.copy(args[place]) for place in places], again)
        return y

    return row


def contiguous(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
    """Run Tensor.contiguous: a copy of what is made again of others is made so too."""
    y = input.contiguous(*args, **named)
    if y is not input:
        stash.recompute(y, (stash.find_recomputed(input),), Tensor.clone)
    return y


def div(stash: Stash, input: Any, other: Any, **named: Any) -> Tensor:
    """Run torch.div: for a gradient of ``other`` PyTorch keeps both exact, and the result is made again of them."""
    y = torch.div(input, other, **named)
    if isinstance(input, Tensor) and isinstance(other, Tensor) and not named and other.requires_grad:
        stash.recompute(y, (input, other), torch.div)
    return y


def power(stash: Stash, input: Any, exponent: Any) -> Tensor:
    """Run torch.pow(input, 2), or 3 (transformers' gelu_new, of GPT-2). Other exponents keep their input exact: a
    gradient may divide by it."""
    if not isinstance(input, Tensor) or isinstance(exponent, Tensor) or exponent not in (2, 3):
        return torch.pow(input, exponent)
    return square(stash, input) if exponent == 2 else cube(stash, input)  # type: ignore[no-any-return]


def norm(stash: Stash, input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    if p not in ("fro", 2):
        return torch.norm(input, p, dim, keepdim, **named)
    return vector_norm(stash, input, 2, dim, keepdim, **named)


def vector_norm(
    stash: Stash, input: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Run torch.linalg.vector_norm. What no other operation keeps stays exact: a loss's, or what its norm divides."""
    run = partial(torch.linalg.vector_norm, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)
    if ord != 2 or dtype is not None or stash.find(input) is None:
        return run(input)
    return Activation.apply(stash, input, run, partial(_norm_backward, dim=dim), None, False, None)  # type: ignore[no-untyped-call]


def _norm_backward(dy: Tensor, x: Tensor, dim: Any) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    return x * (dy.reshape(length.shape) / length).masked_fill_(length == 0, 0)


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
            stash.recompute(y, (source, stash.exact(index)), make)


def gather(stash: Stash, input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Run torch.gather: nothing but the index. PyTorch keeps the input too, for its shape."""
    if sparse_grad:
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
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
    """torch.index_add: nothing but the index."""
    if in_place and (torch.compiler.is_compiling() or input._is_view() or (input.is_leaf and input.requires_grad)):
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
