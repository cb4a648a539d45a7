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
from dsq.stash.saved_forms import Saved, SavedForm, save, saved
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
        noise_form = _noise_form(stash, noise, _MAX_NOISE_BITS * (q.numel() + k.numel() + v.numel()))
        save(ctx, *forms, _mask_form(stash, mask, cast or q.dtype, copies), random, noise_form)
        ctx.options, ctx.cast = options, cast
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, mask, random, noise), needed = saved(ctx), ctx.needs_input_grad[1:5]
        gradients = _attend_backward(dy, q, k, v, _cast(mask, ctx.cast), random, noise, ctx.options, needed)
        return None, *gradients, None, None


def _noise_form(stash: Stash, noise: Tensor | None, max_bits: int) -> SavedForm | None:
    """Return the bytes of the kernel's noise as a bit each; None if they are more than ``max_bits``."""
    if noise is None or noise.numel() > max_bits:
        return None
    bits = pack_mask(noise.view(torch.bool), 0.0, math.nan, True)
    return stash.packed_mask(bits, MemoryOrder.contiguous(noise.shape), torch.bfloat16)


def _mask_form(stash: Stash, mask: Tensor | None, dtype: torch.dtype, copies: bool) -> Saved | None:
    """Return the form of the mask of an attention in ``dtype``: what it was made of (pointwise.outer), if that is less.

    PyTorch saves a copy of a bool mask, and of one that it casts.
    """
    if mask is None:
        return None
    mask_is_copied = copies or mask.dtype != dtype
    return stash.find_recomputed(mask) or (stash.copy(mask) if mask_is_copied else stash.exact(mask))


def _cast(mask: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return ``mask`` as autocast, which asks for ``dtype``, passes it to PyTorch's function; layers share it."""
    return mask if mask is None or dtype is None or mask.dtype == torch.bool else mask.to(dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the result; with dropout the state of the random numbers that it drew from; and the noise of the backend's
    kernel, if that ran.

    PyTorch's dropout makes three matrices (B, H, L, S) of float32; the backend's kernel one of bytes.
    """
    random = None
    draws: list[Tensor] = []

    def noise() -> Tensor:
        draws.append(_noise(q, k, dropout))
        return draws[0]

    y = None
    if dropout:
        random = torch.cuda.get_rng_state(q.device) if q.device.type == "cuda" else torch.get_rng_state()
        attend = backend_for(q.device).attention
        if attend and torch.backends.cuda.flash_sdp_enabled():
            y = attend(q, k, v, AttentionOptions(causal, scale, mask, dropout, noise))
    if y is None:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    return y, random, draws[0] if draws else None


def _attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    random: Tensor | None,
    noise: Tensor | None,
    options: tuple[Any, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients of q, k, v and the mask; None for each that is not ``needed``."""
    dropout, causal, scale, gqa = options
    q, k, v = (x.to(dy.dtype) for x in (q, k, v))
    kernels = backend_for(dy.device).attention_gradients
    if kernels and torch.backends.cuda.flash_sdp_enabled():  # not where sdpa_kernel(SDPBackend.MATH) asks: dsq.report
        draw = None
        if random is not None:
            draw = partial(_noise, dy, k, dropout, random) if noise is None else partial(noise.to, torch.uint8)
        gradients = kernels(dy, q, k, v, AttentionOptions(causal, scale, mask, dropout, draw), needed[3])
        if gradients is not None:
            return [x if is_needed else None for x, is_needed in zip((*gradients, None), needed, strict=False)]
    inputs: list[Any] = [
        x if x is None or x.dtype == torch.bool else x.detach().requires_grad_(is_needed)
        for x, is_needed in zip((q, k, v, mask), needed, strict=True)
    ]
    with _drawing(random, dy.device), torch.enable_grad():
        q, k, v, mask = inputs
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    leaves = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    leaf_gradients = iter(torch.autograd.grad(y, leaves, dy))
    return [next(leaf_gradients) if is_needed else None for is_needed in needed]


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
