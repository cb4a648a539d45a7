"""Rules of the activations, and of products value by value.

An activation saves its input, from which its result, which the next linear layer would save, is recomputed. A product
saves both factors, from which its result is recomputed: a gated unit saves its two inputs alone. A factor that is
broadcast (a row's 1 / deviation in an RMS norm that is written out) stays exact: it is small, and every value of the
row is multiplied by it.

A loss that a model writes out stays as exact as PyTorch's losses, which have no rule: a residual against data, what is
divided, and exponentials (dsq/stash/stash.py). In codes of 4 bits the residual of the component that fits a point was 0
beside those that do not, and a mixture of Gaussians (y - mean) exp(-s) shrank its deviations without end.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.rules.norms import channels
from dsq.stash.saved_forms import reusable_buffers, save, saved
from dsq.stash.stash import Stash

aten = torch.ops.aten
#: an input at which what saturates has all but the gradient of an infinite one: 1e-7 of a sigmoid, 0 of a tanh
SATURATED = 16.0


def smooth_activation(
    function: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    infinity: float | None = None,
    saves_result: bool = False,
    **options: Any,
) -> Callable[..., Tensor]:
    """Return the rule of an activation whose gradient reads x, which is saved in codes.

    Args:
        backward: (dy, x, options) -> dx.
        infinity: the value that stands for infinite inputs; the function is finite there.
        saves_result: PyTorch saves the result, and x may be overwritten. An x that stays exact is left to PyTorch.
        options: those of ``function`` by name, in PyTorch's order, at their defaults.
    """
    prepare = None if infinity is None else partial(_bounded, infinity=infinity)
    writes = isinstance(backward, torch._ops.OpOverloadPacket) and "grad_input" in backward.overloads()

    def activate(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
        arguments, overwrites = _arguments(options, args, named)
        # coded before it is overwritten; the apply below finds it in the cache
        form = stash.code(input, "activation", prepare) if overwrites or saves_result else None
        if isinstance(form, Tensor):
            y = function(input, *args, **named)
            if not overwrites:
                stash.leave_exact(y)
            return y
        run, gradient = partial(function, **arguments), partial(backward, **arguments)
        y = SmoothActivation.apply(stash, input, run, gradient, writes, prepare)  # type: ignore[no-untyped-call]
        return overwrite(stash, input, y) if overwrites else y

    return activate


def threshold_activation(
    function: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    limits: Callable[..., tuple[float, float]],
    **options: Any,
) -> Callable[..., Tensor]:
    """Return the rule of an activation whose gradient reads whether x lies between two limits, saved in a bit a value.

    Args:
        backward: (dy, mask, options) -> dx. The mask is 1 between the limits, and 0 elsewhere.
        limits: (options) -> the lower and the upper limit; NaN for none.
        options: those of ``function`` by name, in PyTorch's order, at their defaults.
    """

    def activate(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
        arguments, overwrites = _arguments(options, args, named)
        run, gradient = partial(function, **arguments), partial(backward, **arguments)
        y = ThresholdActivation.apply(stash, input, run, gradient, limits(**arguments))  # type: ignore[no-untyped-call]
        return overwrite(stash, input, y) if overwrites else y

    return activate


def _arguments(options: dict[str, Any], args: tuple[Any, ...], named: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the options of a call of an activation by name, and whether it is in place, which comes last."""
    arguments = options | dict(zip((*options, "inplace"), args, strict=False)) | named
    return arguments, arguments.pop("inplace", False)


def _bounded(values: Tensor, infinity: float) -> Tensor:
    """Return ``values`` with ``infinity`` for infinite ones, which no code has."""
    if values.device.type == "cpu" and math.isfinite(values.sum()):
        return values
    return values.nan_to_num(math.nan, infinity, -infinity)


def overwrite(stash: Stash, x: Tensor, y: Tensor) -> Tensor:
    """Copy ``y``, the result of a rule whose gradient does not read the values of ``x``, into ``x``."""
    form = stash.find(y)
    x.copy_(y)
    stash.register_recomputed(x, (form,), lambda y: y)
    return x


class SmoothActivation(torch.autograd.Function):
    """y = run(x), with dx = gradient(dy, x). ``writes``: ``gradient`` takes a tensor to write to, ``grad_input``."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, run: Any, gradient: Any, writes: bool, prepare: Any) -> Tensor:
        y: Tensor = run(x)
        form = stash.code(x, "activation", prepare)
        save(ctx, form)
        stash.register_recomputed(y, (form,), run)
        ctx.gradient, ctx.writes = gradient, writes
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved(ctx)
        (buffer,) = reusable_buffers(ctx, dy, x)
        if buffer is not None and ctx.writes and (dy.dtype, dy.shape) == (x.dtype, x.shape):
            return None, ctx.gradient(dy, x, grad_input=buffer), *[None] * 4
        return None, ctx.gradient(dy, x.to(dy.dtype)), *[None] * 4


class ThresholdActivation(torch.autograd.Function):
    """y = run(x), with dx = gradient(dy, mask)."""

    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, run: Any, gradient: Any, limits: tuple[float, float]) -> Tensor:
        y: Tensor = run(x)
        form = stash.find(x)
        save(ctx, stash.bitmask(x, *limits, nan_is_open=False))
        stash.register_recomputed(y, (form,), run)
        ctx.gradient = gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = saved(ctx)
        return None, ctx.gradient(dy, mask.to(dy.dtype)), *[None] * 3


tanh = smooth_activation(torch.tanh, lambda dy, x: aten.tanh_backward(dy, x.tanh()), SATURATED, saves_result=True)
sigmoid = smooth_activation(
    torch.sigmoid, lambda dy, x: aten.sigmoid_backward(dy, x.sigmoid()), SATURATED, saves_result=True
)
square = smooth_activation(torch.square, lambda dy, x: 2 * dy * x)
cube = smooth_activation(partial(torch.pow, exponent=3), lambda dy, x: 3 * dy * x * x)
ACTIVATIONS: dict[Any, Any] = {
    F.gelu: smooth_activation(F.gelu, aten.gelu_backward, approximate="none"),
    F.silu: smooth_activation(F.silu, aten.silu_backward),
    F.mish: smooth_activation(F.mish, aten.mish_backward),
    F.hardswish: smooth_activation(F.hardswish, aten.hardswish_backward),
    F.elu: smooth_activation(
        F.elu, lambda dy, x, alpha: aten.elu_backward(dy, alpha, 1.0, 1.0, False, x), SATURATED, alpha=1.0
    ),
    F.selu: smooth_activation(
        F.selu, lambda dy, x: aten.elu_backward(dy, 1.6732632423543772, 1.0507009873554805, 1.0, False, x), SATURATED
    ),
    F.softplus: smooth_activation(F.softplus, aten.softplus_backward, SATURATED, beta=1.0, threshold=20.0),
    F.leaky_relu: threshold_activation(
        F.leaky_relu,
        lambda dy, mask, negative_slope: dy * (mask + (1 - mask) * negative_slope),
        limits=lambda negative_slope: (0.0, math.nan),
        negative_slope=0.01,
    ),
    F.relu6: threshold_activation(F.relu6, torch.mul, limits=lambda: (0.0, 6.0)),
    F.hardtanh: threshold_activation(
        F.hardtanh,
        lambda dy, mask, **_: dy * mask,
        limits=lambda min_val, max_val: (min_val, max_val),
        min_val=-1.0,
        max_val=1.0,
    ),
    F.glu: smooth_activation(F.glu, aten.glu_backward, dim=-1),  # a product of one half and a sigmoid of the other
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
        needs_dw = ctx.needs_input_grad[2]
        form = stash.code(x, "activation") if needs_dw else stash.find(x)
        save(ctx, stash.bitmask(x, nan_is_open=False), form if needs_dw else None, weight)
        stash.register_recomputed(y, (form, weight), lambda x, weight: F.prelu(x, weight.to(x.dtype)))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mask, x, weight = saved(ctx)
        dy_below, slopes = dy * (1 - mask), channels(weight, dy) if dy.dim() else weight.view(())
        dw = None if x is None else (dy_below * x).sum_to_size(slopes.shape).view(weight.shape)
        return None, dy * mask + dy_below * slopes, dw


def mul(stash: Stash, input: Any, other: Any) -> Tensor:
    """Run torch.mul of two tensors of which at least one wants a gradient."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in (input, other)):
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
        needs_da, needs_db = ctx.needs_input_grad[1:3]
        a_form = stash.factor(a, "factor", needs_db, exact=a.shape != y.shape)
        forms = a_form, stash.factor(b, "factor", needs_da, exact=b.shape != y.shape)
        save(ctx, *forms)
        if plus is None:
            stash.register_recomputed(y, forms, torch.mul)
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
    """Run torch.sub. The difference to a tensor without a gradient is a loss's residual, which stays exact wherever
    it is saved."""
    y = torch.sub(input, other, alpha=alpha)
    if isinstance(input, Tensor) and isinstance(other, Tensor) and input.requires_grad != other.requires_grad:
        stash.leave_exact(y)
    return y


def rsub(stash: Stash, input: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """Run torch.rsub: 1 - z, as in z h + (1 - z) x, recomputed if z is. Codes of a z near 1 would lose 1 - z."""
    y = torch.rsub(input, other, alpha=alpha)
    if not isinstance(other, Tensor):
        stash.register_recomputed(y, (stash.find_recomputed(input),), lambda z: torch.rsub(z, other, alpha=alpha))
    return y


def outer(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the rule of a function whose result may be much larger than its operands, as a learned bias of all
    sequences under the mask of each. Such a result is recomputed."""

    def rule(stash: Stash, *args: Any, **named: Any) -> Any:
        y = function(*args, **named)
        positions = [position for position, x in enumerate(args) if isinstance(x, Tensor)]
        # torch.where of a condition alone returns indices
        if not named and isinstance(y, Tensor) and y.numel() >= 2 * sum(args[i].numel() for i in positions):
            constants = [None if isinstance(x, Tensor) else x for x in args]

            def recompute(*values: Tensor) -> Tensor:
                tensors = dict(zip(positions, values, strict=True))
                return function(*(tensors.get(position, constant) for position, constant in enumerate(constants)))

            stash.register_recomputed(y, [stash.copy(args[position]) for position in positions], recompute)
        return y

    return rule


def contiguous(stash: Stash, input: Tensor, *args: Any, **named: Any) -> Tensor:
    """Run Tensor.contiguous: the copy of a recomputed tensor is recomputed too."""
    y = input.contiguous(*args, **named)
    if y is not input:
        stash.register_recomputed(y, (stash.find_recomputed(input),), Tensor.clone)
    return y


def div(stash: Stash, input: Any, other: Any, **named: Any) -> Tensor:
    """Run torch.div: for a gradient of ``other`` PyTorch saves both exact, and the result is recomputed from them."""
    y = torch.div(input, other, **named)
    if isinstance(input, Tensor) and isinstance(other, Tensor) and not named and other.requires_grad:
        stash.register_recomputed(y, (input, other), torch.div)
    return y


def power(stash: Stash, input: Any, exponent: Any) -> Tensor:
    """Run torch.pow(input, 2), or 3 (transformers' gelu_new, of GPT-2). Other exponents save their input exact: a
    gradient may divide by it."""
    if not isinstance(input, Tensor) or isinstance(exponent, Tensor) or exponent not in (2, 3):
        return torch.pow(input, exponent)
    return square(stash, input) if exponent == 2 else cube(stash, input)


def norm(stash: Stash, input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    if p not in ("fro", 2):
        return torch.norm(input, p, dim, keepdim, **named)
    return vector_norm(stash, input, 2, dim, keepdim, **named)


def vector_norm(
    stash: Stash, input: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Run torch.linalg.vector_norm. A tensor that no other operation saves stays exact: a loss's, or one that its norm
    divides."""
    run = partial(torch.linalg.vector_norm, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)
    if ord != 2 or dtype is not None or stash.find(input) is None:
        return run(input)
    return SmoothActivation.apply(stash, input, run, partial(_norm_backward, dim=dim), False, None)  # type: ignore[no-untyped-call]


def _norm_backward(dy: Tensor, x: Tensor, dim: Any) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    return x * (dy.reshape(length.shape) / length).masked_fill_(length == 0, 0)
