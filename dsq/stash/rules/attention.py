"""Rules of attention: softmax, and fused attention.

Both follow the first principle of dsq/stash/rules. A softmax saves the roots of its result, which is unpacked as a
softmax: no value below 0, rows that sum to 1. In a linear code of 6 bits a value under 1/64 of its block's largest
rounds to 0, and so does the gradient of -log of it if a model ends in a softmax; by roots the limit is 1/4096. Fused
attention saves q, k and v, and dropout's noise where that is little: its result and the logarithms of its rows' sums
are recomputed from the rounded q and k in the backward. If these were saved exact, as PyTorch's backward takes them,
exp(q k - lse) would not sum to 1, and the gradient of a peaked attention would grow without bound (by 20,000 at 4 bits
and logits of deviation 36).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from dsq.kernels.backend import AttentionOptions
from dsq.kernels.dispatch import backend_for, bernoulli, pack_mask
from dsq.ops.products import autocast_dtype
from dsq.stash.memory import MemoryOrder
from dsq.stash.saved_forms import save, saved
from dsq.stash.stash import Stash


def softmax(
    stash: Stash, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if dim is None or input.dim() == 0:
        return F.softmax(input, dim, _stacklevel, dtype)
    return Softmax.apply(stash, input, dim, dtype)  # type: ignore[no-any-return, no-untyped-call]


def torch_softmax(stash: Stash, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run torch.softmax, whose third argument is the dtype."""
    return softmax(stash, input, dim, dtype=dtype)


def safe_softmax(stash: Stash, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax of dsq.ops.products.attention, whose rows without a key are zeros."""
    return Softmax.apply(stash, input, dim, dtype, True)  # type: ignore[no-any-return, no-untyped-call]


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, dim: int, dtype: torch.dtype | None, safe: bool = False) -> Tensor:
        y = torch.ops.aten._safe_softmax(x, dim, dtype) if safe else F.softmax(x, dim, dtype=dtype)
        save(ctx, stash.code_repaired(y, "softmax", lambda roots: _rows_of_one(roots, dim), prepare=_roots))
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = saved(ctx)
        # the operator casts float32 to float16 alone, and on GPUs alone
        dx = torch.ops.aten._softmax_backward_data(dy, y, ctx.dim, y.dtype).to(ctx.dtype)
        return None, dx, None, None, None


def _roots(y: Tensor) -> Tensor:
    """Return what is coded of a softmax. A row that is masked as a whole is NaN, which would spread over a block to
    rows beside it: it is saved as zeros."""
    return y.sqrt().nan_to_num_(0.0)


def _rows_of_one(roots: Tensor, dim: int) -> Tensor:
    squares = roots.clamp_(min=0).square_()
    sums = squares.sum(dim, keepdim=True)
    return squares.div_(sums.clamp_(min=torch.finfo(sums.dtype).tiny))  # a row without a key is zeros


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
    options = dropout_p or 0.0, is_causal, scale, enable_gqa
    copies = _saves_copies(query, key, value, attn_mask, *options)
    return FusedAttention.apply(stash, query, key, value, attn_mask, options, copies)  # type: ignore[no-any-return, no-untyped-call]


def _saves_copies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> bool:
    """Return whether PyTorch would attend by single operations, which save scaled q and k, and no mask."""
    dropout, causal, scale, gqa = options
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    return choice == SDPBackend.MATH.value


#: bits of dropout's noise that are saved for a value of q, k and v, of 4.5 bits by default; where there are more, the
#: backward draws the noise again, in up to 7 ns a number
_MAX_NOISE_BITS = 2


class FusedAttention(torch.autograd.Function):
    """The backward has the forward's noise, saved or drawn again, in the backend's kernel or in PyTorch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        stash: Stash,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: tuple[Any, ...],
        copies: bool,
    ) -> Tensor:
        forms = [stash.code(x, "attention") for x in (q, k, v)]
        if copies:
            forms = [stash.copy(form) if isinstance(form, Tensor) else form for form in forms]
        cast = autocast_dtype(q)  # which PyTorch's function asks for, a kernel does not
        q, k, v = (x.to(cast or x.dtype) for x in (q, k, v))
        y, random, noise = _attend(q, k, v, _cast(mask, cast), *options)
        of_noise = None
        if noise is not None and noise.numel() <= _MAX_NOISE_BITS * (q.numel() + k.numel() + v.numel()):
            bits = pack_mask(noise.view(torch.bool), 0.0, math.nan, True)
            of_noise = stash.packed_mask(bits, MemoryOrder.contiguous(noise.shape), torch.bfloat16)
        of_mask = None
        if mask is not None:
            # PyTorch saves a copy of a bool mask, and of one that it casts
            mask_copied = copies or mask.dtype != (cast or q.dtype)
            # what it was made of (pointwise.outer), if that is less
            of_mask = stash.find_recomputed(mask) or (stash.copy(mask) if mask_copied else stash.exact(mask))
        save(ctx, *forms, of_mask, random if options[0] else None, of_noise)
        ctx.options, ctx.cast = options, cast
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (*qkv, mask, random, noise), needed = saved(ctx), ctx.needs_input_grad[1:5]
        gradients = _attend_backward(dy, *qkv, _cast(mask, ctx.cast), random, noise, *ctx.options, needed)
        return None, *(dx if is_needed else None for dx, is_needed in zip(gradients, needed, strict=True)), None, None


def _cast(mask: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return ``mask`` as autocast, which asks for ``dtype``, passes it to PyTorch's function; layers share it."""
    return mask if mask is None or dtype is None or mask.dtype == torch.bool else mask.to(dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the result, the state of the random numbers that its dropout drew from (else empty), and the noise of the
    backend's kernel (else None).

    PyTorch's dropout makes three matrices (B, H, L, S) of float32; the backend's kernel one of bytes.
    """
    y = None
    noises: list[Tensor] = []
    random = q.new_empty(0, dtype=torch.uint8)
    attend = backend_for(q.device).attention
    if dropout:
        random = torch.cuda.get_rng_state(q.device) if q.device.type == "cuda" else torch.get_rng_state()
        if attend and torch.backends.cuda.flash_sdp_enabled():

            def noise() -> Tensor:
                noises.append(_noise(q, k, dropout))
                return noises[0]

            y = attend(q, k, v, AttentionOptions(causal, scale, mask, dropout, noise))
    if y is None:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    return y, random, noises[0] if noises else None


def _attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    random: Tensor | None,
    noise: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Return the gradients of q, k, v and the mask; empty ones where none is ``wanted``, the last of the options."""
    dropout, causal, scale, gqa, needed = options
    kernels = torch.backends.cuda.flash_sdp_enabled()  # not where sdpa_kernel(SDPBackend.MATH) asks, as dsq.report does
    gradients = backend_for(dy.device).attention_gradients
    if gradients and kernels:
        draw = None
        if random is not None:
            draw = partial(_noise, dy, k, dropout, random) if noise is None else partial(noise.to, torch.uint8)
        attention_options = AttentionOptions(causal, scale, mask, dropout, draw)
        kernel_gradients = gradients(dy, *(x.to(dy.dtype) for x in (q, k, v)), attention_options, needed[3])
        if kernel_gradients is not None:
            return [
                x if is_needed else dy.new_empty(0)
                for x, is_needed in zip((*kernel_gradients, dy), needed, strict=False)
            ]
    inputs: list[Any] = [
        x if x is None or x.dtype == torch.bool else x.detach().requires_grad_(is_needed)
        for x, is_needed in zip((*(x.to(dy.dtype) for x in (q, k, v)), mask), needed, strict=True)
    ]
    with _drawing(random, dy.device), torch.enable_grad():
        q, k, v, mask = inputs
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    input_gradients = iter(
        torch.autograd.grad(y, [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed], dy)
    )
    return [next(input_gradients) if is_needed else dy.new_empty(0) for is_needed in needed]


@contextmanager
def _drawing(random: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from the state ``random`` on, if there is one, and go on behind as if none had been drawn."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if random is not None and on_gpu else [], enabled=random is not None):
        if random is not None:
            torch.cuda.set_rng_state(random, device) if on_gpu else torch.set_rng_state(random)
        yield


def _noise(q: Tensor, k: Tensor, dropout: float, random: Tensor | None = None) -> Tensor:
    """Return what PyTorch's attention on CPUs multiplies its weights (B, H, L, S) by: ones, and zeros for dropped ones,
    drawn from the state ``random`` if there is one."""
    with _drawing(random, q.device):
        return bernoulli((*q.shape[:3], k.shape[2]), 1 - dropout)
