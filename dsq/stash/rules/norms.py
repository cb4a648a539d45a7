"""Rules of the normalizations: one code of x^ = (x - mean) / deviation, which serves whoever reads the result too.

x itself may lie far from 0, where codes are coarse; x^ never does. The deviations stay exact, a float a row. Unpacked,
x^ is normalized once more, so that the backward is that of a state the norm could have been in; the result is
recomputed as x^ weight + bias, so a linear layer behind a norm saves nothing of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.ops.products import autocast_dtype
from dsq.stash.memory import is_weight
from dsq.stash.saved_forms import Saved, save, saved
from dsq.stash.stash import Stash

aten = torch.ops.aten

_MIN_SQUARE = 1e-8  #: of the mean of x^ ** 2


def layer_norm(
    stash: Stash, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return LayerNorm.apply(stash, input, list(normalized_shape), weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        axes = tuple(range(-len(shape), 0))
        if autocast_dtype(x) is not None:  # which may cast x first
            y = F.layer_norm(x, shape, weight, bias, eps)
            wide = x.to(torch.promote_types(y.dtype, torch.float32))
            x_hat, _, rstd = aten.native_layer_norm(wide, shape, None, None, eps)
        else:
            y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, eps)
            x_hat = (x - mean).mul_(rstd)
        x_hat, saved_rstd = x_hat.to(y.dtype), stash.exact(rstd)
        form = stash.code_repaired(x_hat, "layernorm", partial(_renormalized, axes=axes, eps=eps), saved_rstd)
        _save(ctx, stash, y, (form, saved_rstd), weight, weight, bias)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, rstd, weight = saved(ctx)
        needs_dx, _, *parameters = ctx.needs_input_grad[1:5]
        if weight is None and parameters[1]:  # PyTorch shapes the gradient of a bias like the weight
            weight = dy.new_ones(ctx.shape)
        weight = None if weight is None else weight.to(torch.promote_types(weight.dtype, dy.dtype))
        standard = _standard(rstd.to(dy.dtype if weight is None else weight.dtype))  # as PyTorch's backward wants it
        dx, dw, db = aten.native_layer_norm_backward(
            dy, x_hat.to(dy.dtype), ctx.shape, *standard, weight, weight, [needs_dx, *parameters]
        )
        return None, None if dx is None else dx.mul_(rstd), None, dw, db, None


def _save(
    ctx: Any,
    stash: Stash,
    y: Tensor,
    forms: tuple[Saved, ...],
    weight: Tensor | None,
    *affine: Tensor | None,
    scaled: Callable[..., Tensor] | None = None,
) -> None:
    """Save x^, the other ``forms`` and the weight. ``affine``: weight and bias in the shapes that broadcast to y.
    ``scaled`` makes y of these; None: ``_scaled``."""
    save(ctx, *forms, weight)
    sources = [x for x in (forms[0], *affine) if x is not None]
    stash.register_recomputed(y, sources, (scaled or _scaled) if affine[0] is not None else _shifted)


def _scaled(x_hat: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x_hat * weight if bias is None else torch.addcmul(bias.to(x_hat.dtype), x_hat, weight.to(x_hat.dtype))


def _shifted(x_hat: Tensor, bias: Tensor | None = None) -> Tensor:
    return x_hat if bias is None else x_hat + bias.to(x_hat.dtype)


def _renormalized(rounded: Tensor, rstd: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return ``rounded`` with the mean and the deviation that x^ has: 1 but where ``eps`` counts."""
    centred = rounded - rounded.mean(axes, keepdim=True)
    return centred.mul_(_renormalizing_scale(centred, rstd, axes, eps))


def _renormalizing_scale(centred: Tensor, rstd: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return 1 / deviation of the rows of x^ itself, where ``rstd`` was that of x."""
    wide = rstd.to(torch.promote_types(rstd.dtype, torch.float32))  # its square may be too large for a half
    if axes[0] >= 0:  # of a batch norm: a norm over axes that are not the last ones takes six times as long
        square = (centred * centred).mean(axes, keepdim=True)
    else:  # without the squares, whose memory is as large as that of x^
        lengths = torch.linalg.vector_norm(centred, 2, axes, True, dtype=wide.dtype)
        square = lengths.square_().div_(centred.numel() // lengths.numel())
    # 1, but 0 where the variance of x was infinite: a half has the root of the bound, and 0 times it is 0
    return (square + eps * wide**2).clamp_min(_MIN_SQUARE).rsqrt().to(centred.dtype)


def _standard(rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and 1 / deviation of x^, which PyTorch's backward is given for x."""
    return torch.zeros_like(rstd), torch.ones_like(rstd)


def rms_norm(
    stash: Stash, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return RMSNorm.apply(stash, input, list(normalized_shape), weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        axes = tuple(range(-len(shape), 0))
        y = F.rms_norm(x, shape, weight, eps)
        wide = x.float() if x.dtype.itemsize < 4 else x
        eps = torch.finfo(wide.dtype).eps if eps is None else eps  # as PyTorch's, of what it sums in
        rstd = (wide.square().mean(axes, keepdim=True) + eps).rsqrt()
        x_hat, saved_rstd = (wide * rstd).to(y.dtype), stash.exact(rstd)
        form = stash.code_repaired(
            x_hat, "layernorm", lambda u, rstd: u * _renormalizing_scale(u, rstd, axes, eps), saved_rstd
        )
        _save(ctx, stash, y, (form, saved_rstd), weight, weight)
        ctx.axes, ctx.shape = axes, shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, rstd, weight = saved(ctx)
        g = dy if weight is None else dy * weight
        dx = rstd * (g - x_hat * (g * x_hat).mean(ctx.axes, keepdim=True))
        dw = None if weight is None else (dy * x_hat).sum_to_size(ctx.shape)
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
    running = running_mean, running_var
    # an empty batch ends PyTorch's backward, called by itself, with the process
    too_few = input.dim() < 2 or input.numel() <= training * input.shape[1]
    if too_few or is_weight(input):  # weights are standardized by it: they exist anyway
        return F.batch_norm(input, *running, weight, bias, training, momentum, eps)
    return BatchNorm.apply(stash, input, weight, bias, running, training, momentum, eps)  # type: ignore[no-any-return, no-untyped-call]


class BatchNorm(torch.autograd.Function):
    """By running statistics, x^ has no unit variance, and is saved for the gradient of the scale alone."""

    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, weight: Any, bias: Any, running: Any, training: bool, *options: float
    ) -> Tensor:
        ctx.training, ctx.eps = training, options[1]
        y, *batch = aten.native_batch_norm(x, weight, bias, *running, training, *options)
        affine = channels(weight, x), channels(bias, x)
        if training:
            center, rstd = (channels(t, x) for t in batch)
            x_hat, saved_rstd = _normalized_channels(x, center, rstd).to(y.dtype), stash.exact(rstd)
            renormalized = partial(_renormalized_channels, eps=ctx.eps)
            form = stash.code_repaired(x_hat, "batchnorm", renormalized, saved_rstd)
            _save(ctx, stash, y, (form, saved_rstd), weight, *affine, scaled=_scaled_channels)
        elif weight is not None and weight.requires_grad:
            rstd = channels((running[1] + ctx.eps).rsqrt(), x)
            form = stash.code((x - channels(running[0], x)).mul_(rstd).to(y.dtype), "batchnorm")
            _save(ctx, stash, y, (form, *running), weight, *affine)
        else:
            save(ctx, None, *running, weight)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, *statistics, weight = saved(ctx)
        weight = None if weight is None else weight.contiguous()  # the kernel reads no strides
        needs_dx, *parameters = ctx.needs_input_grad[1:4]
        if ctx.training:
            rstd = statistics[0].flatten()
            # the gradient of x is that of x^ times rstd, as it is times the weight
            weight = rstd if weight is None else (weight * rstd).to(weight.dtype)
            dx, dw, db = aten.native_batch_norm_backward(
                *(dy, x_hat, weight, None, None, *_standard(rstd), True, 0.0), [needs_dx, *parameters]
            )
            return None, dx, dw, db, *[None] * 4
        dx, _, db = aten.native_batch_norm_backward(
            dy, dy, weight, *statistics, None, None, False, ctx.eps, [needs_dx, False, parameters[1]]
        )
        dw = (dy * x_hat).sum([axis for axis in range(dy.dim()) if axis != 1]) if parameters[0] else None
        return None, dx if needs_dx else None, dw, db if parameters[1] else None, *[None] * 4


# On CPUs one kernel of PyTorch makes a batch norm's passes over bfloat16 in a ninth to a half of the time of single
# operations: by running statistics, which are those of the batch, or 0 and 1.


def _by_statistics(x: Tensor, mean_C: Tensor, var_C: Tensor, *affine_C: Tensor | None) -> Tensor:
    """Return (x - mean) / sqrt(var), times the weight and plus the bias, in the dtype of ``x`` (N, C, ...)."""
    weight_C, bias_C = affine_C or (None, None)
    y: Tensor = aten.native_batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, 0.0)[0]
    return y


def _normalized_channels(x: Tensor, center: Tensor, rstd: Tensor) -> Tensor:
    """Return x^."""
    if not x.is_cpu:
        return (x - center).mul_(rstd)
    mean_C, rstd_C = (
        statistic.flatten().to(torch.promote_types(x.dtype, torch.float32)) for statistic in (center, rstd)
    )
    return _by_statistics(x, mean_C, rstd_C.square().reciprocal_())


def _renormalized_channels(rounded: Tensor, rstd: Tensor, eps: float) -> Tensor:
    """Return ``rounded`` as ``_renormalized`` does, over all axes but the second."""
    if not rounded.is_cpu or rounded.dtype.itemsize > 2:  # the kernel of these statistics is slow in float32
        return _renormalized(rounded, rstd, tuple(axis for axis in range(rounded.dim()) if axis != 1), eps)
    mean_C, var_C = aten.batch_norm_update_stats(rounded, None, None, 0.0)
    var_C = (var_C.float() + eps * rstd.flatten().float() ** 2).clamp_min_(_MIN_SQUARE)
    return _by_statistics(rounded, mean_C.float(), var_C)


def _scaled_channels(x_hat: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of a batch norm or a group norm."""
    if not x_hat.is_cpu:
        return _scaled(x_hat, weight, bias)
    weight_C, bias_C = weight.flatten(), None if bias is None else bias.flatten()
    return _by_statistics(x_hat, torch.zeros_like(weight_C), torch.ones_like(weight_C), weight_C, bias_C)


def channels(x: Tensor | None, like: Tensor) -> Any:
    """Return (C,) as it broadcasts against (N, C, ...); None for None."""
    return None if x is None else x.view(-1, *[1] * (like.dim() - 2))


def instance_norm(
    stash: Stash,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Run F.instance_norm: a batch norm whose channels are those of each image, as PyTorch makes it of one."""
    samples = input.shape[0]
    if running_mean is not None or not use_input_stats or input.dim() < 3 or input.shape[2:].numel() <= 1:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    w, b = (None if parameter is None else parameter.repeat(samples) for parameter in (weight, bias))
    x = input.reshape(1, -1, *input.shape[2:])
    return batch_norm(stash, x, None, None, w, b, True, momentum, eps).view(input.shape)


def group_norm(
    stash: Stash, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    if input.numel() == 0:
        return F.group_norm(input, num_groups, weight, bias, eps)
    weight, bias = (None if x is None else x.contiguous() for x in (weight, bias))  # the kernel reads no strides
    return GroupNorm.apply(stash, input, num_groups, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stash: Stash, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.sizes = x.shape[0], x.shape[1], x.shape[2:].numel(), groups
        if autocast_dtype(x) is not None:  # which may cast x first
            y = F.group_norm(x, groups, weight, bias, eps)
            wide = x.to(torch.promote_types(y.dtype, torch.float32)).contiguous()
            x_hat, _, rstd = aten.native_group_norm(wide, None, None, *ctx.sizes, eps)
        else:
            y, mean, rstd = aten.native_group_norm(x.contiguous(), weight, bias, *ctx.sizes, eps)
            by_group = x.reshape(x.shape[0], groups, -1)
            x_hat = (by_group - mean[..., None]).mul_(rstd[..., None])
        forms = stash.code(x_hat.to(y.dtype).view(x.shape), "groupnorm"), stash.exact(rstd)
        _save(ctx, stash, y, forms, weight, channels(weight, x), channels(bias, x), scaled=_scaled_channels)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, rstd, weight = saved(ctx)
        needs_dx, _, *parameters = ctx.needs_input_grad[1:5]
        dx, dw, db = aten.native_group_norm_backward(
            dy.contiguous(), x_hat.contiguous(), *_standard(rstd), weight, *ctx.sizes, [needs_dx, *parameters]
        )
        if dx is not None:
            dx = (dx.view(*rstd.shape, -1) * rstd[..., None]).view(dx.shape)
        return None, dx, None, dw, db, None


def normalize(stash: Stash, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Run F.normalize, as cosine attention does."""
    if p != 2 or is_weight(input):
        return F.normalize(input, p, dim, eps)
    return Normalize.apply(stash, input, dim, eps)  # type: ignore[no-any-return, no-untyped-call]


class Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, dim: int, eps: float) -> Tensor:
        length = x.norm(2, dim, keepdim=True).clamp_min(eps)
        y: Tensor = x / length
        lengths = stash.exact(length)

        def renormalized(y: Tensor, length: Tensor) -> Tensor:
            return torch.where(length > eps, F.normalize(y, dim=dim), y)

        save(ctx, stash.code_repaired(y, "layernorm", renormalized, lengths), lengths)
        ctx.dim, ctx.eps = dim, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, length = saved(ctx)
        # a length of eps is constant
        projection = (dy * y).sum(ctx.dim, keepdim=True).masked_fill_(length <= ctx.eps, 0)
        return None, (dy - y * projection) / length, None, None
