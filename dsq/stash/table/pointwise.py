"""Rows of the activations, of products value by value, and of operations that move values.

An activation keeps its input; what it makes, which the next linear layer would keep, is made again from that. A product
keeps both factors and gives its result again: a gated unit keeps its two inputs and nothing else. A factor that is
broadcast (a row's 1 / deviation in an RMS norm that is written out) stays exact: it is small, and every value of the
row is multiplied by it.

What moves values keeps an index, and gives its result again from a code of the input. A message of a graph network,
x[source], is as long as the edges are many: the product that weighs it would keep it, and x, which is far smaller, is
kept already.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.codes import Form, Kept, Stash, keep, kept

ACTIVATION = Kept("activation", "gelu")
FACTOR = Kept("factor", "other")

aten = torch.ops.aten
#: (y, dy, x, options) -> dx, by what is kept of an activation: its input
Backward = Callable[..., Tensor]


def activation(function: Callable[..., Tensor], backward: Backward, *names: str, **defaults: Any) -> Any:
    """The row of an activation. names: of its options, in PyTorch's order, with their defaults."""

    def activate(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
        options = defaults | dict(zip(names, args, strict=False)) | named
        in_place = options.pop("inplace", False)
        if in_place:
            return function(input, *args, **named)
        values = tuple(options[name] for name in names if name != "inplace")
        return Activation.apply(stash, input, function, backward, values)  # type: ignore[no-any-return, no-untyped-call]

    return activate


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, function: Callable[..., Tensor], backward: Backward, options: tuple[Any, ...]
    ) -> Tensor:
        y = _call(function, x, options)
        form = stash.code(x, ACTIVATION)
        keep(ctx, form)
        stash.derive(y, (form,), lambda x: _call(function, x, options))
        ctx.gradient, ctx.options = backward, options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = kept(ctx)
        return None, ctx.gradient(dy, x.to(dy.dtype), *ctx.options), None, None, None


def _call(function: Callable[..., Tensor], x: Tensor, options: tuple[Any, ...]) -> Tensor:
    if function is F.gelu:
        return F.gelu(x, approximate=options[0])
    return function(x, *options)


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return aten.gelu_backward(dy, x, approximate=approximate)  # type: ignore[no-any-return]


def softplus_backward(dy: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return aten.softplus_backward(dy, x, beta, threshold)  # type: ignore[no-any-return]


def elu_backward(dy: Tensor, x: Tensor, alpha: float) -> Tensor:
    return aten.elu_backward(dy, alpha, 1.0, 1.0, False, x)  # type: ignore[no-any-return]


def selu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.elu_backward(dy, 1.6732632423543772, 1.0507009873554805, 1.0, False, x)  # type: ignore[no-any-return]


def sigmoid_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(dy, x.sigmoid())  # type: ignore[no-any-return]


def tanh_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.tanh_backward(dy, x.tanh())  # type: ignore[no-any-return]


def glu(stash: Stash, input: Tensor, dim: int = -1) -> Tensor:
    """F.glu: a product of one half and a sigmoid of the other."""
    gradient = lambda dy, x, dim: aten.glu_backward(dy, x, dim)  # noqa: E731
    return Activation.apply(stash, input, F.glu, gradient, (dim,))  # type: ignore[no-any-return, no-untyped-call]


def mul(stash: Stash, input: Any, other: Any) -> Tensor:
    """torch.mul of two tensors of which at least one wants a gradient."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.mul(input, other)
    if not input.is_floating_point() or not other.is_floating_point():
        return torch.mul(input, other)
    return Mul.apply(stash, input, other)  # type: ignore[no-any-return, no-untyped-call]


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, a: Tensor, b: Tensor) -> Tensor:
        y = torch.mul(a, b)
        a_wanted, b_wanted = ctx.needs_input_grad[1:]
        forms = (_factor(stash, a, y, b_wanted), _factor(stash, b, y, a_wanted))
        keep(ctx, *forms)
        stash.derive(y, forms, torch.mul)
        ctx.shapes = a.shape, b.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        a, b = kept(ctx)
        da = None if b is None else (dy * b).sum_to_size(ctx.shapes[0])
        db = None if a is None else (dy * a).sum_to_size(ctx.shapes[1])
        return None, da, db


def _factor(stash: Stash, x: Tensor, y: Tensor, wanted: bool) -> Form | None:
    if not wanted:
        return None
    return stash.code(x, FACTOR) if x.requires_grad and x.shape == y.shape else stash.exact(x)


def square(stash: Stash, input: Tensor) -> Tensor:
    """torch.square."""
    return power(stash, input, 2)


def power(stash: Stash, input: Any, exponent: Any) -> Tensor:
    """torch.pow(input, 2); other exponents keep their input exact: a gradient may divide by it."""
    if not isinstance(input, Tensor) or isinstance(exponent, Tensor) or exponent != 2:
        return torch.pow(input, exponent)
    gradient = lambda dy, x: 2 * dy * x  # noqa: E731
    return Activation.apply(stash, input, torch.square, gradient, ())  # type: ignore[no-any-return, no-untyped-call]


def index_select(stash: Stash, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """torch.index_select."""
    y = torch.index_select(input, dim, index)
    _from_index(stash, y, input, index, lambda x, index: torch.index_select(x, dim, index))
    return y


def getitem(stash: Stash, input: Tensor, index: Any) -> Tensor:
    """x[index] by one tensor of places; other indices are views, or rare."""
    y: Tensor = input[index]
    if isinstance(index, Tensor) and index.dtype == torch.int64:
        _from_index(stash, y, input, index, lambda x, index: x[index])
    return y


def _from_index(stash: Stash, y: Tensor, x: Tensor, index: Tensor, make: Any) -> None:
    if x.requires_grad and x.is_floating_point() and x.dim() >= 2:
        source = stash.find(x)
        if source is not None:
            stash.derive(y, (source, stash.exact(index)), make)
