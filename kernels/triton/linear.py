"""The passes of a linear layer on a GPU. Each tensor is read once for all of its roundings.

    forward    largest of x (and of w); Q0(x) with the stash Q1(x); Q0(w); the product; the bias
    backward   largest of dy and w; Q2(dy) with Q3(dy); Qw(w); the product, and its result's format; Q1(x); the product

``largest`` runs if a format has an exponent for the whole tensor. analysis/gpu/launches.py counts the launches.
"""

import torch
from torch import Tensor

from dsq.kernels.backend import BackwardCall, Codes, ForwardCall, GemmKernel, LinearSpec, MatMul, Operand
from dsq.kernels.dispatch import layout_of
from dsq.kernels.reference.backend import TORCH
from dsq.kernels.triton import codec
from dsq.kernels.triton.gemm import GEMMS, matmul_bf16

_GEMMS_BY_NAME = {gemm.name: gemm for gemm in GEMMS}


class TritonLinear:
    """FusedLinear (kernels/backend.py)."""

    def forward(self, spec: LinearSpec, gemm: str) -> ForwardCall | None:
        matmul, x_for_dw = spec.matmuls.output, spec.matmuls.x_for_dw
        dtypes = spec.dtypes
        kernel = _GEMMS_BY_NAME[gemm]
        x_shape_TK, w_shape, y_shape = spec.x_shape_TK, spec.w_shape, spec.y_shape
        inner = _narrower(dtypes.x, dtypes.y)
        x_request = _request(matmul.a, x_shape_TK, kernel.a_dtype or inner, spec)
        w_request = _request(matmul.b, w_shape, kernel.b_dtype or inner, spec)
        x_requests: list[tuple[codec.Request, ...]] = [(x_request,)]
        if x_for_dw.format is not None:
            x_requests.append((x_request, _request(x_for_dw, x_shape_TK, None, spec)))
        w_job = dtypes.w, (w_request,)
        encoders = [codec.Encoder((dtypes.x, requests), w_job) for requests in x_requests]  # by whether x is packed
        product = _Product(kernel, matmul, (x_shape_TK, w_shape), inner, dtypes.y)

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x_TK, w = x.detach().reshape(x_shape_TK).contiguous(), w.detach().contiguous()
            (a, *packed), (b,) = encoders[packing](seed, x_TK, w)
            # autograd forbids changes in place of a view that a Function returned
            y = torch.ops.aten._unsafe_view.default(product(a, b, bias, seed), y_shape)
            return y, Codes(packed[0][0], packed[0][1], x_shape_TK) if packing else None

        return call

    def backward(self, spec: LinearSpec, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        _, dx_matmul, dw_matmul = spec.matmuls
        dx_gemm, dw_gemm = gemms
        dtypes = spec.dtypes
        x_shape, x_shape_TK, y_shape_TN, w_shape = spec.x_shape, spec.x_shape_TK, spec.y_shape_TN, spec.w_shape
        dy_requests, w_jobs = [], []
        dx_product = dw_product = unpack_arguments = None
        if dx_gemm is not None:
            kernel, inner = _GEMMS_BY_NAME[dx_gemm], _narrower(dtypes.y, dtypes.x)
            dy_requests.append(_request(dx_matmul.a, y_shape_TN, kernel.a_dtype or inner, spec))
            w_jobs.append((dtypes.w, (_request(dx_matmul.b, w_shape, kernel.b_dtype or inner, spec),)))
            dx_product = _Product(kernel, dx_matmul, (y_shape_TN, w_shape), inner, dtypes.x)
        if dw_gemm is not None:
            kernel, inner = _GEMMS_BY_NAME[dw_gemm], _narrower(dtypes.y, dtypes.w)
            dy_requests.append(_request(dw_matmul.a, y_shape_TN, kernel.a_dtype or inner, spec))
            x_for_dw = dw_matmul.b
            unpack_arguments = x_for_dw.quantized_to, layout_of(x_shape_TK, x_for_dw.axis), kernel.b_dtype or inner
            dw_product = _Product(kernel, dw_matmul, (y_shape_TN, x_shape_TK), inner, dtypes.w)
        encoder = codec.Encoder((dtypes.y, tuple(dy_requests)), *w_jobs)

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            assert dy.dtype is dtypes.y
            dx = dw_NK = None
            dy_TN = dy.detach().reshape(y_shape_TN).contiguous()
            dy_values, *w_values = encoder(seed, dy_TN) if w is None else encoder(seed, dy_TN, w.detach().contiguous())
            del dy_TN
            if dx_product is not None:
                dx = dx_product(dy_values.pop(0), w_values.pop()[0], None, seed).view(x_shape)
            if dw_product is not None and unpack_arguments is not None and x is not None:
                codes, scales = x.codes.contiguous(), x.scales.contiguous()  # hooks may have changed their order
                x_TK = codec.unpack(codes, scales, *unpack_arguments).view(x_shape_TK)
                dw_NK = dw_product(dy_values.pop(), x_TK, None, seed)
            return dx, dw_NK

        return call


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch multiplies, if it does (dsq.ops.products.multiply)."""
    return min(a, b, key=lambda dtype: dtype.itemsize)


def _request(operand: Operand, shape: torch.Size, dtype: torch.dtype | None, spec: LinearSpec) -> codec.Request:
    """Return the request for a matrix of the layer as values of ``dtype``; None: packed."""
    seed_offset = operand.seed if spec.stochastic else None
    return codec.Request(operand.quantized_to, layout_of(shape, operand.axis), dtype, seed_offset)


class _Product:
    """The product of two quantized matrices of these shapes, with the bias, in the result's format and dtype."""

    def __init__(
        self,
        kernel: GemmKernel,
        matmul: MatMul,
        shapes: tuple[torch.Size, torch.Size],
        inner: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self.kernel, self.matmul, self.dtype = kernel, matmul, dtype
        # PyTorch's product rounds to bfloat16 itself, as under autocast: each part, if cuBLAS splits the sums
        self.rounds_itself = kernel.run is matmul_bf16 and dtype is torch.bfloat16 and matmul.result is None
        self.bias_dtype = inner if kernel is TORCH else torch.promote_types(inner, torch.float32)
        self.layout = layout_of(matmul.sizes(*shapes)[:2], -1)

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, seed: int | None) -> Tensor:
        matmul = self.matmul
        a = a.mT if matmul.a.transposed else a
        b = b.mT if matmul.b.transposed else b
        if bias is not None:
            bias = bias.detach().to(self.dtype if self.rounds_itself else self.bias_dtype)
        if self.rounds_itself:
            return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        y = self.kernel.run(matmul, a, b, bias)
        if matmul.result is None:
            return y.to(self.dtype)
        return codec.quantize(y, matmul.result, self.layout, matmul.seed_of_result(seed), self.dtype)
