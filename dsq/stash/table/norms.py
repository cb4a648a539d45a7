"""Rows of the normalisations: one code of x^ = (x - mean) / deviation, which serves whoever reads the result too.

x itself may lie far from 0, where codes are coarse; x^ never does. The deviations stay exact, a float a row. Unpacked,
x^ is normalised once more, so that the backward is that of a state the norm could have been in; the result is made
again as x^ weight + bias, so a linear layer behind a norm keeps nothing of its own.

Shape suffixes: R rows (or groups, or channels) that share a mean, D values of one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.codes import Form, Kept, Stash, exact_form, keep, kept

LAYER = Kept("norm", "layernorm")
GROUP = Kept("norm", "other", axis=1)
BATCH = Kept("norm", "batchnorm", axis=1)


def layer_norm(
    stash: Stash,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm."""
    if not _differentiable(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return LayerNorm.apply(stash, input, list(normalized_shape), weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def _differentiable(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        axes = tuple(range(-len(shape), 0))
        if torch.is_autocast_enabled(x.device.type):  # which may cast x first
            y = F.layer_norm(x, shape, weight, bias, eps)
            variance, mean = torch.var_mean(x.to(y.dtype), axes, correction=0, keepdim=True)
            inverse = (variance + eps).rsqrt()
        else:
            y, mean, inverse = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
        unit = _keep_unit(ctx, stash, (x - mean).mul_(inverse).to(y.dtype), LAYER, inverse, weight, axes, eps)
        if weight is None or bias is not None:
            stash.derive(y, (unit, *_exact(stash, weight, bias)), _scaled)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, weight = kept(ctx)
        none, one = torch.zeros_like(inverse), torch.ones_like(inverse)
        dx_wanted, _, *parameters = ctx.needs_input_grad[1:5]
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy, unit.to(dy.dtype), ctx.shape, none, one, weight, weight, [dx_wanted, *parameters]
        )
        return None, None if dx is None else dx * inverse, None, dw, db, None


def _keep_unit(
    ctx: Any,
    stash: Stash,
    unit: Tensor,
    word: Kept,
    inverse: Tensor,
    weight: Tensor | None,
    axes: tuple[int, ...] | None,
    eps: float,
) -> Form:
    """Keep x^ in codes, 1 / deviation and the weight exact. ``axes``: of a row; None: x^ is no unit (evaluation)."""
    deviations = stash.exact(inverse)
    if axes is None:
        form = stash.code(unit, word)
    else:
        form = stash.restored(unit, word, lambda rounded, inverse: _unit(rounded, inverse, axes, eps), deviations)
    keep(ctx, form, deviations, None if weight is None else stash.exact(weight))
    return form


def _unit(rounded: Tensor, inverse: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """``rounded`` with the mean and the deviation that x^ has: 1 but where ``eps`` counts."""
    centred = rounded - rounded.mean(axes, keepdim=True)
    return centred.mul_(_again(centred, inverse, axes, eps))


def _again(centred: Tensor, inverse: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """1 / deviation of the rows of x^ itself, where ``inverse`` was that of x."""
    square = (centred * centred).mean(axes, keepdim=True)
    return (square + eps * inverse.to(square.dtype) ** 2).rsqrt()


def _exact(stash: Stash, *parameters: Tensor | None) -> list[Form]:
    return [stash.exact(parameter) for parameter in parameters if parameter is not None]


def _scaled(unit: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    if weight is None:
        return unit
    return unit * weight if bias is None else torch.addcmul(bias.to(unit.dtype), unit, weight.to(unit.dtype))


def rms_norm(
    stash: Stash, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """F.rms_norm."""
    if not _differentiable(input, weight):
        return F.rms_norm(input, normalized_shape, weight, eps)
    return RMSNorm.apply(stash, input, list(normalized_shape), weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        axes = tuple(range(-len(shape), 0))
        y = F.rms_norm(x, shape, weight, eps)
        eps = torch.finfo(y.dtype).eps if eps is None else eps
        wide = x.float() if x.dtype.itemsize < 4 else x
        inverse = (wide.square().mean(axes, keepdim=True) + eps).rsqrt()
        deviations = stash.exact(inverse)
        unit = stash.restored(
            (wide * inverse).to(y.dtype), LAYER, lambda u, inverse: u * _again(u, inverse, axes, eps), deviations
        )
        keep(ctx, unit, deviations, None if weight is None else stash.exact(weight))
        stash.derive(y, (unit, *_exact(stash, weight)), _scaled)
        ctx.axes, ctx.shape = axes, shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, weight = kept(ctx)
        g = dy if weight is None else dy * weight
        dx = inverse * (g - unit * (g * unit).mean(ctx.axes, keepdim=True))
        dw = None if weight is None else (dy * unit).sum_to_size(ctx.shape)
        return None, dx.to(dy.dtype), None, dw, None


def batch_norm(
    stash: Stash,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm."""
    if not _differentiable(input, weight, bias) or input.dim() < 2 or (training and input.numel() == input.shape[1]):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training and not _differentiable(weight):
        return FrozenBatchNorm.apply(input, weight, bias, running_mean, running_var, eps)  # type: ignore[no-any-return, no-untyped-call]
    return BatchNorm.apply(  # type: ignore[no-any-return, no-untyped-call]
        stash, input, weight, bias, running_mean, running_var, training, momentum, eps
    )


class BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stash: Stash,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        if not training:
            assert mean is not None
            assert variance is not None
            # before the call: it may be given as a view of what changes
            by_channel = mean.clone(), (variance + eps).rsqrt()
        y, *batch = torch.ops.aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
        centre, inverse = (_channels(t, x) for t in (batch if training else by_channel))
        axes = tuple(axis for axis in range(x.dim()) if axis != 1) if training else None
        unit = _keep_unit(ctx, stash, (x - centre).mul_(inverse).to(y.dtype), BATCH, inverse, weight, axes, eps)
        scales = [] if weight is None else [_channels(weight, x)]
        if weight is None or bias is not None:
            stash.derive(y, (unit, *_exact(stash, *scales, *([] if bias is None else [_channels(bias, x)]))), _scaled)
        ctx.training = training
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, weight = kept(ctx)
        dx_wanted, *parameters = ctx.needs_input_grad[1:4]
        if not ctx.training:
            axes = [axis for axis in range(dy.dim()) if axis != 1]
            factor = inverse if weight is None else inverse * _channels(weight, dy)
            dw = (dy * unit).sum(axes) if parameters[0] else None
            return None, dy * factor, dw, dy.sum(axes) if parameters[1] else None, *[None] * 5
        flat = inverse.flatten()
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, unit, weight, None, None, torch.zeros_like(flat), torch.ones_like(flat), True, 0.0,
            [dx_wanted, *parameters],
        )  # fmt: skip
        return None, None if dx is None else dx * inverse, dw, db, *[None] * 5


class FrozenBatchNorm(torch.autograd.Function):
    """By running statistics and with a frozen scale: the gradient reads nothing of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        keep(ctx, *(None if t is None else exact_form(t) for t in (weight, mean, variance)))
        ctx.eps = eps
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, variance = kept(ctx)
        wanted = [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]]
        dx, _, db = torch.ops.aten.native_batch_norm_backward(
            dy, dy, weight, mean, variance, None, None, False, ctx.eps, wanted
        )
        return dx, None, db if wanted[2] else None, None, None, None


def _channels(x: Tensor, like: Tensor) -> Tensor:
    """(C,) as it broadcasts against (N, C, ...)."""
    return x.view(-1, *[1] * (like.dim() - 2))


def group_norm(
    stash: Stash,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm."""
    special = input.numel() == 0 or torch.is_autocast_enabled(input.device.type)
    if special or not _differentiable(input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    return GroupNorm.apply(stash, input, num_groups, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.sizes = x.shape[0], x.shape[1], x.shape[2:].numel(), groups
        y, mean, inverse = torch.ops.aten.native_group_norm(x.contiguous(), weight, bias, *ctx.sizes, eps)
        by_group = x.reshape(x.shape[0], groups, -1)
        unit = (by_group - mean[..., None]).mul_(inverse[..., None]).to(y.dtype).view(x.shape)
        form = stash.code(unit, GROUP)
        keep(ctx, form, stash.exact(inverse), None if weight is None else stash.exact(weight))
        if weight is None or bias is not None:
            scales = [] if weight is None or bias is None else [_channels(weight, x), _channels(bias, x)]
            stash.derive(y, (form, *_exact(stash, *scales)), _scaled)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, weight = kept(ctx)
        dx_wanted, _, *parameters = ctx.needs_input_grad[1:5]
        none, one = torch.zeros_like(inverse), torch.ones_like(inverse)
        dx, dw, db = torch.ops.aten.native_group_norm_backward(
            dy.contiguous(), unit.contiguous(), none, one, weight, *ctx.sizes, [dx_wanted, *parameters]
        )
        if dx is not None:
            dx = (dx.view(*inverse.shape, -1) * inverse[..., None]).view(dx.shape)
        return None, dx, None, dw, db, None
