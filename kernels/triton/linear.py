"""The passes of a linear layer on a GPU: each tensor is read once for all that is made of it.

    forward    largest of x (and of w); Q0(x) with the stash Q1(x); Q0(w); the product; the bias
    backward   largest of dy and w; Q2(dy) with Q3(dy); Qw(w); the product, and its result's format; Q1(x); the product

A ``largest`` runs where a format has an exponent for the whole tensor. analysis/gpu/expected.py counts what runs.
"""

from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import BackwardCall, Codes, ForwardCall, GemmKernel, Layer, MatMul, Operand
from dsq.kernels.dispatch import layout_of
from dsq.kernels.reference.backend import TORCH
from dsq.kernels.triton import codec
from dsq.kernels.triton.gemm import GEMMS, matmul_bf16

_BY_NAME = {gemm.name: gemm for gemm in GEMMS}


class Passes:
    """FusedLinear (kernels/backend.py)."""

    def forward(self, layer: Layer, gemm: str) -> ForwardCall | None:
        (matmul, _, _), stash, dtypes, kernel = layer.matmuls, layer.matmuls.stash, layer.dtypes, _BY_NAME[gemm]
        x_matrix, y_shape, inner = layer.x_matrix, layer.y_shape, _narrower(dtypes.x, dtypes.y)

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x_TK, w = x.detach().reshape(x_matrix).contiguous(), w.detach().contiguous()
            of_x = [_wanted(kernel, matmul.a, x_TK, kernel.a_dtype or inner, seed)]
            if packing:
                of_x.append(_packed(stash, x_TK, seed))
            of_w = [_wanted(kernel, matmul.b, w, kernel.b_dtype or inner, seed)]
            (left, *kept), (right,) = codec.encode((x_TK, of_x), (w, of_w))
            y = _multiplied(kernel, matmul, (left, x_TK.shape), (right, w.shape), bias, seed, inner, dtypes.y)
            # autograd does not let a view be changed in place that a Function gives
            y = torch.ops.aten._unsafe_view(y, y_shape)
            return y, Codes(kept[0][0], kept[0][1], x_matrix) if packing else None

        return call

    def backward(self, layer: Layer, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        (_, of_dx, of_dw), dtypes = layer.matmuls, layer.dtypes
        dx_kernel, dw_kernel = (TORCH if gemm is None else _BY_NAME[gemm] for gemm in gemms)
        dx_inner, dw_inner = _narrower(dtypes.y, dtypes.x), _narrower(dtypes.y, dtypes.w)
        y_matrix, x_shape = layer.y_matrix, layer.x_shape

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            dy_TN, of_dy, jobs = dy.detach().reshape(y_matrix).contiguous(), [], []
            dx = dw_NK = None
            if w is not None:
                w = w.detach().contiguous()
                of_dy.append(_wanted(dx_kernel, of_dx.a, dy_TN, dx_kernel.a_dtype or dx_inner, seed))
                jobs.append((w, [_wanted(dx_kernel, of_dx.b, w, dx_kernel.b_dtype or dx_inner, seed)]))
            if x is not None:
                of_dy.append(_wanted(dw_kernel, of_dw.a, dy_TN, dw_kernel.a_dtype or dw_inner, seed))
            left, *right = codec.encode((dy_TN, of_dy), *jobs)
            if w is not None:
                given = (left.pop(0), dy_TN.shape), (right[0][0], w.shape)
                dx = _multiplied(dx_kernel, of_dx, *given, None, seed, dx_inner, dtypes.x).view(x_shape)
                del given, right
            if x is not None:
                codes, scales = x.codes.contiguous(), x.scales.contiguous()  # hooks may have changed their order
                x_1: Any = codes, scales
                if not dw_kernel.packed:
                    fmt, layout = of_dw.b.quantised_to, layout_of(x.shape, of_dw.b.axis)
                    x_1 = codec.unpack(codes, scales, fmt, layout, dw_kernel.b_dtype or dw_inner).view(x.shape)
                given = (left.pop(0), dy_TN.shape), (x_1, x.shape)
                dw_NK = _multiplied(dw_kernel, of_dw, *given, None, seed, dw_inner, dtypes.w)
            return dx, dw_NK

        return call


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch multiplies, if it does (dsq.ops.products.multiply)."""
    return min(a, b, key=lambda dtype: dtype.itemsize)


def _wanted(kernel: GemmKernel, operand: Operand, x: Tensor, dtype: torch.dtype, seed: int | None) -> codec.Wanted:
    """``x`` as ``kernel`` takes it: packed, or values of ``dtype``."""
    wanted = _packed(operand, x, seed)
    return wanted if kernel.packed else wanted._replace(dtype=dtype)


def _packed(operand: Operand, x: Tensor, seed: int | None) -> codec.Wanted:
    own_seed = None if seed is None else seed + operand.seed
    return codec.Wanted(operand.quantised_to, layout_of(x.shape, operand.axis), own_seed, None)


def _multiplied(
    kernel: GemmKernel,
    matmul: MatMul,
    a: tuple[Any, torch.Size],
    b: tuple[Any, torch.Size],
    bias: Tensor | None,
    seed: int | None,
    inner: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """The product of what was made of two matrices of these shapes, with the bias, in the result's format."""
    left: Any
    right: Any
    left, right = (
        Codes(made[0], made[1], shape) if kernel.packed else made.mT if operand.transposed else made
        for operand, (made, shape) in ((matmul.a, a), (matmul.b, b))
    )
    if kernel.run is matmul_bf16 and dtype is torch.bfloat16 and matmul.result is None:
        # PyTorch's product rounds to bfloat16 itself, as autocast has it: each part where cuBLAS splits the sums
        return torch.mm(left, right) if bias is None else torch.addmm(bias.detach().to(dtype), left, right)
    if bias is not None:
        bias = bias.detach().to(inner if kernel is TORCH else torch.promote_types(inner, torch.float32))
    y = kernel.run(matmul, left, right, bias)
    if matmul.result is None:
        return y.to(dtype)
    own_seed = None if seed is None else seed + matmul.result_seed
    return codec.quantize(y, matmul.result, layout_of(y.shape, -1), own_seed, dtype)
