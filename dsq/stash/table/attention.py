"""Rows of attention: softmax, and attention in one call.

Both follow the first principle of the table. A softmax is kept by its result, which is unpacked as one: no value below
0, rows that sum to 1. Attention in one call keeps q, k and v alone: its result and the logarithms of its rows' sums are
made again of the rounded q and k in the backward. Kept exact beside rounded q and k, as PyTorch's backward wants them,
exp(q k - lse) would not sum to 1, and the gradient of a peaked attention grows without bound (a factor of 20,000 at 4
bits and logits of standard deviation 36).
"""

from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.codes import Stash, keep, kept


def softmax(
    stash: Stash, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """F.softmax, torch.softmax and Tensor.softmax."""
    if dim is None or isinstance(_stacklevel, torch.dtype) or input.dim() == 0:
        return F.softmax(input, dim, _stacklevel, dtype)
    return Softmax.apply(stash, input, dim, dtype)  # type: ignore[no-any-return, no-untyped-call]


def torch_softmax(stash: Stash, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax, whose third argument is the dtype."""
    return softmax(stash, input, dim, dtype=dtype)


def safe_softmax(stash: Stash, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of dsq.ops.products.attention, whose rows without a key are zeros."""
    return Softmax.apply(stash, input, dim, dtype, True)  # type: ignore[no-any-return, no-untyped-call]


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, dim: int, dtype: torch.dtype | None, safe: bool = False) -> Tensor:
        y = torch.ops.aten._safe_softmax(x, dim, dtype) if safe else F.softmax(x, dim, dtype=dtype)
        keep(ctx, stash.restored(y, "softmax", lambda rounded: _rows_of_one(rounded, dim)))
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = kept(ctx)
        return None, torch.ops.aten._softmax_backward_data(dy, y, ctx.dim, ctx.dtype), None, None, None


def _rows_of_one(rounded: Tensor, dim: int) -> Tensor:
    positive = rounded.clamp(min=0)
    sums = positive.sum(dim, keepdim=True)
    return positive.div_(sums.clamp_(min=torch.finfo(sums.dtype).tiny))  # a row without a key is zeros


def fused(
    stash: Stash,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention."""
    function: Any = TracedAttention if torch.compiler.is_compiling() else Attention
    return function.apply(stash, query, key, value, attn_mask, (dropout_p, is_causal, scale, enable_gqa))  # type: ignore[no-any-return]


class Attention(torch.autograd.Function):
    """Runs PyTorch's own again in the backward, from the rounded q, k and v and the same random numbers."""

    @staticmethod
    def forward(
        ctx: Any, stash: Stash, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        random = None
        if options[0]:
            random = stash.exact(torch.cuda.get_rng_state(q.device) if q.is_cuda else torch.get_rng_state())
        forms = [stash.code(x, "attention") for x in (q, k, v)]
        keep(ctx, *forms, None if mask is None else stash.exact(mask), random)
        ctx.options = options
        return _attend(q, k, v, mask, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, random = kept(ctx)
        inputs: list[Any] = [
            x if x is None or x.dtype == torch.bool else x.detach().to(dy.dtype).requires_grad_(wanted)
            for x, wanted in zip((q, k, v, mask), ctx.needs_input_grad[1:5], strict=True)
        ]
        devices = [dy.device] if random is not None and dy.is_cuda else []
        with torch.random.fork_rng(devices, enabled=random is not None), torch.enable_grad():
            if random is not None:
                torch.cuda.set_rng_state(random, dy.device) if dy.is_cuda else torch.set_rng_state(random)
            y = _attend(inputs[0], inputs[1], inputs[2], inputs[3], ctx.options)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, dy))
        return None, *(next(found) if x is not None and x.requires_grad else None for x in inputs), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    dropout, causal, scale, gqa = options
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)


class TracedAttention(torch.autograd.Function):
    """Written out for compilers: the backward makes one layer's map, of the rounded q and k.

    Shape suffixes: L queries, S keys, D features.
    """

    @staticmethod
    def forward(
        ctx: Any, stash: Stash, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        dropout, _, _, gqa = options
        forms = [stash.code(x, "attention") for x in (q, k, v)]
        noise = None
        if dropout:
            lead = torch.broadcast_shapes(q.shape[:-2], _grouped(k, q, gqa).shape[:-2])
            noise = torch.rand((*lead, q.shape[-2], k.shape[-2]), device=q.device) >= dropout
            y = _map(q, k, mask, options) * noise / (1 - dropout) @ _grouped(v, q, gqa)
        else:
            y = _attend(q, k, v, mask, options)
        keep(ctx, *forms, None if mask is None else stash.exact(mask), None if noise is None else stash.bits(noise))
        ctx.options = options
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, noise = kept(ctx)
        dropout, _, scale, gqa = ctx.options
        q, k, v = (x.to(dy.dtype) for x in (q, k, v))
        p_LS = _map(q, k, mask, ctx.options)
        kept_LS = p_LS if noise is None else p_LS * noise.to(p_LS.dtype) / (1 - dropout)
        dv = kept_LS.mT @ dy
        dp_LS = dy @ _grouped(v, q, gqa).mT
        if noise is not None:
            dp_LS = dp_LS * noise.to(p_LS.dtype) / (1 - dropout)
        ds_LS = p_LS * (dp_LS - (dp_LS * p_LS).sum(-1, keepdim=True))
        factor = 1 / sqrt(q.shape[-1]) if scale is None else scale
        dq, dk = factor * (ds_LS @ _grouped(k, q, gqa)), factor * (ds_LS.mT @ q)
        dmask = ds_LS.sum_to_size(mask.shape) if mask is not None and ctx.needs_input_grad[4] else None
        return None, dq.sum_to_size(q.shape), _ungrouped(dk, k, gqa), _ungrouped(dv, v, gqa), dmask, None


def _grouped(x: Tensor, q: Tensor, gqa: bool) -> Tensor:
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if gqa else x


def _ungrouped(gradient: Tensor, x: Tensor, gqa: bool) -> Tensor:
    if gqa:
        gradient = torch.unflatten(gradient, -3, (x.shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(x.shape)


def _map(q: Tensor, k: Tensor, mask: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    _, causal, scale, gqa = options
    scores = (q @ _grouped(k, q, gqa).mT) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    return cast(Tensor, torch.ops.aten._safe_softmax(scores, -1))
