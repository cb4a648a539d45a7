"""One linear layer at [q0, q1, q2, q3] (DSQ, section 3, figure 2).

    forward    y  = Q0(x) Q0(w)^T + b              stash Q1(x), packed
    backward   dx = Q3(Q2(dy) Q1(w))
               dw = Q3(dy)^T Q1(x)
               db = sum of dy over tokens

Shape suffixes: T tokens (all leading dimensions), K in-features, N out-features. Boxes run along the contraction axis
of the GEMM that consumes the tensor: K for y, N for dx, T for dw. Q1(w) is made again in the backward from the weight,
which still exists then: the same numbers, and no bytes in the stash.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsq.config import Quantizers
from dsq.gemm import multiply
from dsq.kernels import Codes, Factor, Product
from dsq.precision import Precision
from dsq.sharing import shared_stash


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision | str | Quantizers) -> Tensor:
    """``torch.nn.functional.linear`` with the tensors of its three GEMMs quantised, and a packed stash.

    Where a gradient will be wanted for ``weight``, what stays in memory is Q1(x) in its own bits, once for all calls
    that share ``x``; without one (or under ``no_grad``) nothing stays. Stochastic rounding draws its seed from torch's
    default generator. Differentiable once.

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
    three = products(quantizers)
    source = x
    if torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _autocast(x), _autocast(weight), None if bias is None else _autocast(bias)
    _check(x, weight, bias)
    x_TK = x.flatten(0, -2) if x.dim() > 1 else x[None]
    seed = int(torch.randint(2**62, ())) if quantizers.rounding == "stochastic" else None
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        stash = None
        if weight.requires_grad:
            x1 = three.weight_gradient.b
            stash = shared_stash(source, x_TK, x1.grid, x1.dim, None if seed is None else seed + x1.seed)
        y_TN = _Linear.apply(x_TK, weight, bias, three, seed, stash)
    else:
        y_TN = multiply(three.output, x_TK, weight, bias, seed)
    return y_TN.view(*x.shape[:-1], weight.shape[0])


class Products(NamedTuple):
    """The three GEMMs of a layer."""

    output: Product  #: of x and w
    input_gradient: Product  #: of dy and w
    weight_gradient: Product  #: of dy and the stash


@lru_cache
def products(q: Quantizers) -> Products:
    """The module's equations, each tensor with random numbers of its own."""
    q0, q1, q2, q3 = q.q0.grid, q.q1.grid, q.q2.grid, q.q3.grid
    axis = 0 if q.box_axis == "contraction" else -1
    exact = q.units == "exact"
    return Products(
        Product(Factor(q0, -1, seed=0), Factor(q0, -1, transposed=True, seed=1), exact=exact),
        Product(Factor(q2, -1, seed=4), Factor(q1, axis, seed=3), result=q3, result_seed=6, exact=exact),
        Product(Factor(q3, axis, transposed=True, seed=5), Factor(q1, axis, seed=2), exact=exact),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, bias, products, seed, stash):
        ctx.products, ctx.seed, ctx.shape_TK = products, seed, x_TK.shape
        codes, exponents = stash if stash is not None else (None, None)
        ctx.save_for_backward(w_NK if ctx.needs_input_grad[0] else None, codes, exponents)
        return multiply(products.output, x_TK, w_NK, bias, seed)

    @staticmethod
    def backward(ctx, dy_TN):
        if torch.is_grad_enabled():
            raise RuntimeError("dsq.functional.linear is differentiable once: create_graph=True is not supported")
        w_NK, codes, exponents = ctx.saved_tensors
        x_wanted, w_wanted, bias_wanted = ctx.needs_input_grad[:3]
        dx_TK = dw_NK = db_N = None
        if x_wanted:
            dx_TK = multiply(ctx.products.input_gradient, dy_TN, w_NK, seed=ctx.seed)
        if w_wanted:
            x1_TK = codes if exponents is None else Codes(codes, exponents, ctx.shape_TK)
            dw_NK = multiply(ctx.products.weight_gradient, dy_TN, x1_TK, seed=ctx.seed)
        if bias_wanted:
            db_N = dy_TN.sum(0)
        return dx_TK, dw_NK, db_N, None, None, None


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
