"""The passes of a linear layer on a GPU: each tensor is read once for all that is made of it.

    forward    largest of x (and of w); Q0(x) with the stash Q1(x); Q0(w); the product; the bias
    backward   largest of dy and w; Q2(dy) with Q3(dy); Qw(w); the product, and its result's format; Q1(x); the product

A ``largest`` runs where a format has an exponent for the whole tensor. analysis/gpu/launches.py counts what runs.
"""

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
        (matmul, _, _), dtypes, kernel = layer.matmuls, layer.dtypes, _BY_NAME[gemm]
        x_matrix, w_shape, y_shape = layer.x_matrix, layer.w_shape, layer.y_shape
        inner = _narrower(dtypes.x, dtypes.y)
        of_x = _wanted(matmul.a, x_matrix, kernel.a_dtype or inner, layer)
        of_w = _wanted(matmul.b, w_shape, kernel.b_dtype or inner, layer)
        jobs: list[tuple[codec.Wanted, ...]] = [(of_x,)]
        if layer.matmuls.stash.format is not None:
            jobs.append((of_x, _wanted(layer.matmuls.stash, x_matrix, None, layer)))
        encoders = [codec.Encoder((dtypes.x, it), (dtypes.w, (of_w,))) for it in jobs]  # by whether x is packed
        product = _Product(kernel, matmul, (x_matrix, w_shape), inner, dtypes.y)

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x_TK, w = x.detach().reshape(x_matrix).contiguous(), w.detach().contiguous()
            (left, *kept), (right,) = encoders[packing](seed, x_TK, w)
            # autograd does not let a view be changed in place that a Function gives
            y = torch.ops.aten._unsafe_view.default(product(left, right, bias, seed), y_shape)
            return y, Codes(kept[0][0], kept[0][1], x_matrix) if packing else None

        return call

    def backward(self, layer: Layer, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        (_, of_dx, of_dw), dtypes, (dx_gemm, dw_gemm) = layer.matmuls, layer.dtypes, gemms
        x_shape, x_matrix, y_matrix, w_shape = layer.x_shape, layer.x_matrix, layer.y_matrix, layer.w_shape
        of_dy, of_w, product_dx, product_dw, unpacked = [], [], None, None, None
        if dx_gemm is not None:
            kernel, inner = _BY_NAME[dx_gemm], _narrower(dtypes.y, dtypes.x)
            of_dy.append(_wanted(of_dx.a, y_matrix, kernel.a_dtype or inner, layer))
            of_w.append((dtypes.w, (_wanted(of_dx.b, w_shape, kernel.b_dtype or inner, layer),)))
            product_dx = _Product(kernel, of_dx, (y_matrix, w_shape), inner, dtypes.x)
        if dw_gemm is not None:
            kernel, inner = _BY_NAME[dw_gemm], _narrower(dtypes.y, dtypes.w)
            of_dy.append(_wanted(of_dw.a, y_matrix, kernel.a_dtype or inner, layer))
            unpacked = of_dw.b.quantized_to, layout_of(x_matrix, of_dw.b.axis), kernel.b_dtype or inner
            product_dw = _Product(kernel, of_dw, (y_matrix, x_matrix), inner, dtypes.w)
        encoder = codec.Encoder((dtypes.y, tuple(of_dy)), *of_w)

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            assert dy.dtype is dtypes.y
            dy_TN, dx, dw_NK = dy.detach().reshape(y_matrix).contiguous(), None, None
            left, *right = encoder(seed, dy_TN) if w is None else encoder(seed, dy_TN, w.detach().contiguous())
            del dy_TN
            if product_dx is not None:
                dx = product_dx(left.pop(0), right.pop()[0], None, seed).view(x_shape)
            if product_dw is not None and unpacked is not None and x is not None:
                codes, scales = x.codes.contiguous(), x.scales.contiguous()  # hooks may have changed their order
                x_1 = codec.unpack(codes, scales, *unpacked).view(x_matrix)
                dw_NK = product_dw(left.pop(), x_1, None, seed)
            return dx, dw_NK

        return call


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch multiplies, if it does (dsq.ops.products.multiply)."""
    return min(a, b, key=lambda dtype: dtype.itemsize)


def _wanted(operand: Operand, shape: torch.Size, dtype: torch.dtype | None, layer: Layer) -> codec.Wanted:
    """A matrix of the layer's as values of ``dtype``; None: packed."""
    draws = operand.seed if layer.stochastic else None
    return codec.Wanted(operand.quantized_to, layout_of(shape, operand.axis), dtype, draws)


class _Product:
    """The product of what was made of two matrices of these shapes, with the bias, in the result's format and dtype."""

    def __init__(
        self,
        kernel: GemmKernel,
        matmul: MatMul,
        shapes: tuple[torch.Size, torch.Size],
        inner: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self.kernel, self.matmul, self.dtype = kernel, matmul, dtype
        # PyTorch's product rounds to bfloat16 itself, as autocast has it: each part where cuBLAS splits the sums
        self.rounds = kernel.run is matmul_bf16 and dtype is torch.bfloat16 and matmul.result is None
        self.bias_dtype = inner if kernel is TORCH else torch.promote_types(inner, torch.float32)
        self.layout = layout_of(matmul.sizes(*shapes)[:2], -1)

    def __call__(self, left: Tensor, right: Tensor, bias: Tensor | None, seed: int | None) -> Tensor:
        matmul = self.matmul
        left = left.mT if matmul.a.transposed else left
        right = right.mT if matmul.b.transposed else right
        if bias is not None:
            bias = bias.detach().to(self.dtype if self.rounds else self.bias_dtype)
        if self.rounds:
            return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        y = self.kernel.run(matmul, left, right, bias)
        if matmul.result is None:
            return y.to(self.dtype)
        own_seed = None if seed is None else seed + matmul.result_seed
        return codec.quantize(y, matmul.result, self.layout, own_seed, self.dtype)
