"""One linear layer at [q0, q1, q2, q3] (DSQ, section 3, figure 2).

    forward    y  = Q0(x) Q0(w)^T + b              stash Q1(x), packed
    backward   dx = Q3(Q2(dy) Q1(w))
               dw = Q3(dy)^T Q1(x)
               db = sum of dy over tokens

Shape suffixes: T tokens (all leading dimensions), K in-features, N out-features. Boxes run along the contraction axis
of the GEMM that consumes the tensor: K for y, N for dx, T for dw. Q1(w) is made again in the backward from the weight,
which still exists then: the same numbers, and no bytes in the stash.
"""

import torch
from torch import Tensor

from dsq import passes
from dsq.config import Quantizers
from dsq.kernels import Codes, Products
from dsq.precision import Precision
from dsq.sharing import how_packed, share, shared

_any_autocast = torch._C._is_any_autocast_enabled  # to ask for one device takes six times as long


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision | str | Quantizers) -> Tensor:
    """``torch.nn.functional.linear`` with the tensors of its three GEMMs quantised, and a packed stash.

    Where a gradient will be wanted for ``weight``, what stays in memory is Q1(x) in its own bits, once for all calls
    that share ``x``; without one (or under ``no_grad``) nothing stays. For a gradient of ``x`` the weight itself stays,
    under autocast too, where F.linear keeps a copy: it must not change in place before the backward. Stochastic
    rounding draws its seed from torch's default generator. Differentiable once.

    Args:
        x: (..., K) floating tensor, any number of leading dimensions.
        weight: (N, K), of the dtype of ``x`` (autocast aside, which converts both as it does for F.linear).
        bias: (N,) or None.
        precision: Quantizers, or four widths (BFP, boxes of 16, nearest-even): "[16,4,4,16]".
    Returns:
        (..., N) tensor of the dtype of ``x``.
    Raises:
        TypeError: dtypes that differ. ValueError: shapes or devices that do not fit, a malformed precision.
    """
    quantizers = Quantizers.of(precision)
    products = quantizers.products
    seed = int(torch.randint(2**62, (), device="cpu")) if quantizers.rounding == "stochastic" else None
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias, products, seed)
    return passes.forward(products, *_operands(x, weight, bias), seed, packing=False)[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_NK, bias_N, products: Products, seed: int | None):
        operands = _operands(x, w_NK, bias_N)
        x_wanted, w_wanted = ctx.needs_input_grad[:2]
        packs = w_wanted and products.stash.grid is not None
        how = how_packed(x, operands[0].dtype, products.stash, seed) if packs else ()
        stash = shared(x, how) if packs else None
        y, packed = passes.forward(products, *operands, seed, packing=packs and stash is None)
        if packed is not None:
            share(x, how, packed)
            stash = packed
        if stash is not None:
            codes, exponents, ctx.stash_shape = stash
        else:
            codes, exponents = operands[0].detach() if w_wanted else None, None
        ctx.save_for_backward(w_NK if x_wanted else None, codes, exponents)
        ctx.products, ctx.seed = products, seed
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("dsq.functional.linear is differentiable once: create_graph=True is not supported")
        w_NK, x1, exponents = ctx.saved_tensors
        if w_NK is not None and w_NK.dtype is not dy.dtype:  # autocast
            w_NK = w_NK.to(dy.dtype)
        if exponents is not None:
            x1 = Codes(x1, exponents, ctx.stash_shape)
        dx, dw_NK = passes.backward(ctx.products, dy, w_NK, x1, ctx.seed)
        db_N = passes.matrix(dy).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw_NK, db_N, None, None


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in the type they are multiplied in, which autocast may say."""
    if _any_autocast() and torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _autocast(x), _autocast(weight), None if bias is None else _autocast(bias)
    _check(x, weight, bias)
    return x, weight, bias


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(f"x and weight must share a floating dtype, got {x.dtype} and {weight.dtype}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    if bias is None:
        return
    if bias.dtype != x.dtype:
        raise TypeError(f"bias must have the dtype of x, {x.dtype}, got {bias.dtype}")
    if bias.shape != weight.shape[:1] or bias.device != x.device:
        raise ValueError(f"bias must be ({weight.shape[0]},) on {x.device}, got {tuple(bias.shape)} on {bias.device}")
