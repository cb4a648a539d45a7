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

from dsq import kernels
from dsq.config import Quantizers
from dsq.formats import Format
from dsq.gemm import gemm, multiplies_packed
from dsq.precision import Precision
from dsq.sharing import shared_stash

#: offsets from a call's seed, so that each tensor rounds with random numbers of its own
_SEEDS = {"x0": 0, "w0": 1, "x1": 2, "w1": 3, "dy2": 4, "dy3": 5, "dx3": 6}


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
        TypeError: dtypes that differ. ValueError: shapes that do not fit, a malformed precision.
    """
    quantizers = Quantizers.of(precision)
    source = x
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check(x, weight)
    x_TK = x.reshape(-1, x.shape[-1])
    seed = int(torch.randint(2**62, ())) if quantizers.rounding == "stochastic" else None
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        stash = None
        if weight.requires_grad:
            axis = _axis(quantizers, 0)
            stash = shared_stash(source, x_TK, quantizers.q1, axis, _seed(seed, "x1"))
        y_TN = _Linear.apply(x_TK, weight, bias, quantizers, seed, stash)
    else:
        y_TN = _forward(x_TK, weight, bias, quantizers, seed)
    return y_TN.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, bias, quantizers, seed, stash):
        ctx.quantizers, ctx.seed, ctx.shape_TK = quantizers, seed, x_TK.shape
        codes, exponents = stash if stash is not None else (None, None)
        ctx.save_for_backward(w_NK if ctx.needs_input_grad[0] else None, codes, exponents)
        return _forward(x_TK, w_NK, bias, quantizers, seed)

    @staticmethod
    def backward(ctx, dy_TN):
        if torch.is_grad_enabled():
            raise RuntimeError("dsq.functional.linear is differentiable once: create_graph=True is not supported")
        w_NK, codes, exponents = ctx.saved_tensors
        q, seed = ctx.quantizers, ctx.seed
        dx_TK = dw_NK = db_N = None
        if ctx.needs_input_grad[0]:
            dx_TK = _input_gradient(dy_TN, w_NK, q, seed)
        if ctx.needs_input_grad[1]:
            dw_NK = _weight_gradient(dy_TN, codes, exponents, ctx.shape_TK, q, seed)
        if ctx.needs_input_grad[2]:
            db_N = dy_TN.sum(0)
        return dx_TK, dw_NK, db_N, None, None, None


def _forward(x_TK: Tensor, w_NK: Tensor, bias: Tensor | None, q: Quantizers, seed: int | None) -> Tensor:
    product = gemm(q.q0, q.q0, x_TK.dtype, x_TK.device.type, q.units)
    x0_TK = _quantize(x_TK, q.q0, -1, _seed(seed, "x0"), product.a)
    w0_NK = _quantize(w_NK, q.q0, -1, _seed(seed, "w0"), product.b)
    return product(x0_TK, w0_NK.t(), bias)


def _input_gradient(dy_TN: Tensor, w_NK: Tensor, q: Quantizers, seed: int | None) -> Tensor:
    product = gemm(q.q2, q.q1, dy_TN.dtype, dy_TN.device.type, q.units)
    dy2_TN = _quantize(dy_TN, q.q2, -1, _seed(seed, "dy2"), product.a)
    w1_NK = _quantize(w_NK, q.q1, _axis(q, 0), _seed(seed, "w1"), product.b)
    return _quantize(product(dy2_TN, w1_NK), q.q3, -1, _seed(seed, "dx3"), dy_TN.dtype)


def _weight_gradient(
    dy_TN: Tensor, codes: Tensor, exponents: Tensor | None, shape_TK: torch.Size, q: Quantizers, seed: int | None
) -> Tensor:
    axis, seed = _axis(q, 0), _seed(seed, "dy3")
    if axis == 0 and multiplies_packed(q.q3, q.q1, dy_TN, q.units):
        dy3 = kernels.pack(dy_TN, q.q3.grid, axis, seed)
        return kernels.gemm_boxes(dy3, q.q3.grid, (codes, exponents), q.q1.grid, dy_TN.shape[1], *reversed(shape_TK))
    product = gemm(q.q3, q.q1, dy_TN.dtype, dy_TN.device.type, q.units)
    dy3_TN = _quantize(dy_TN, q.q3, axis, seed, product.a)
    x1_TK = codes if q.q1.grid is None else kernels.unpack(codes, exponents, q.q1.grid, shape_TK, axis, product.b)
    return product(dy3_TN.t(), x1_TK)


def _quantize(x: Tensor, fmt: Format, dim: int, seed: int | None, dtype: torch.dtype) -> Tensor:
    return x if fmt.grid is None else kernels.quantize(x, fmt.grid, dim, seed, dtype)


def _axis(q: Quantizers, contraction: int) -> int:
    return contraction if q.box_axis == "contraction" else -1


def _seed(seed: int | None, tensor: str) -> int | None:
    return None if seed is None else seed + _SEEDS[tensor]


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(f"x and weight must share a floating dtype, got {x.dtype} and {weight.dtype}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
