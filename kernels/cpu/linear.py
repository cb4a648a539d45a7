"""The passes of a linear layer by the compiled kernels, each in one call (src/linear.cpp).

For a small layer the overhead of separate calls costs more than their work. Intermediate results are in scratch memory,
which is reused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsq.formats import Layout
from dsq.kernels.backend import BackwardCall, Codes, ForwardCall, LinearSpec, MatMul
from dsq.kernels.cpu.codec import SCALES, CodecKernels
from dsq.kernels.cpu.library import SEED_MASK
from dsq.kernels.cpu.memory import addresses, scratch
from dsq.kernels.cpu.products import KERNELS, ONEDNN, OperandInput, by_onednn, describe
from dsq.kernels.product_dtype import product_dtype


class CpuLinear:
    """FusedLinear (kernels/backend.py) by the instruction set of ``codec``."""

    def __init__(self, codec: CodecKernels) -> None:
        self._library = codec.library
        self._codec = codec

    def forward(self, spec: LinearSpec, gemm: str) -> ForwardCall | None:
        matmul = spec.matmuls.output
        dtypes = spec.dtypes
        x_shape_TK, y_shape = spec.x_shape_TK, spec.y_shape
        by_torch = gemm not in KERNELS
        widened = by_torch and product_dtype(dtypes.y, "cpu") is not dtypes.y
        if widened or (by_torch and matmul.result is not None) or not _fuses(matmul, spec.matmuls.weight_gradient):
            return None
        x_input, w_input = OperandInput(x_shape_TK, dtypes.x), OperandInput(spec.w_shape, dtypes.w)
        output, _, scratch_size = describe(self._codec, matmul, gemm, x_input, w_input, dtypes.y, spec.stochastic)
        packing_fields, code_shape, scale_shape = self._packing_fields(spec)
        desc = self._library.new("LinearForwardDesc", {"output": output} | packing_fields)
        run = self._library.c.dsq_linear_forward
        bias_dtype = dtypes.y if by_torch else torch.float32
        multiply = _multiply_by(gemm, spec, output) if by_torch else None

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x, w = x.contiguous(), w.contiguous()
            bias = None if bias is None else bias.to(bias_dtype).contiguous()
            allocated_shape = (0,) if gemm == ONEDNN else y_shape  # oneDNN allocates y itself
            y = torch.empty(allocated_shape, dtype=dtypes.y, device="cpu")  # whatever the defaults are
            if by_torch:  # values are large: their memory is freed after this call, for the stash to reuse
                memory = torch.empty(scratch_size // y.itemsize, dtype=dtypes.y, device="cpu")
            else:
                memory = scratch(scratch_size)
            packed = None
            codes_address = scales_address = 0
            if packing:
                codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
                scales = torch.empty(*scale_shape, dtype=torch.uint8, device="cpu")
                codes_address, scales_address = codes.data_ptr(), scales.data_ptr()
                packed = Codes(codes, scales, x_shape_TK)
            run(
                *(desc, *addresses(x, w, bias), y.data_ptr(), codes_address, scales_address),
                *(memory.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK),
            )
            return y if multiply is None else multiply(memory, bias, y), packed

        return call

    def _packing_fields(self, spec: LinearSpec) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
        """Return the fields of a LinearForwardDesc that pack x, and the shapes of codes and scales."""
        x_for_dw = spec.matmuls.x_for_dw
        dtype = spec.dtypes.x
        fmt = x_for_dw.quantized_to
        layout = Layout.of(spec.x_shape_TK, x_for_dw.axis)
        codec = self._codec.fields(fmt, layout, dtype, dtype, spec.stochastic)
        return {"stash": codec, "stash_seed": x_for_dw.seed}, layout.code_shape(fmt.bits), fmt.scale_shape(layout)

    def backward(self, spec: LinearSpec, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        if any(gemm not in KERNELS for gemm in gemms if gemm is not None):
            return None
        dx_gemm, dw_gemm = gemms
        matmuls = spec.matmuls
        of_gemms = (matmuls.input_gradient, dx_gemm), (matmuls.weight_gradient, dw_gemm)
        if not _fuses(*(matmul for matmul, gemm in of_gemms if gemm is not None)):
            return None
        dtypes = spec.dtypes
        dy_input = OperandInput(spec.y_shape_TN, dtypes.y)
        fields = dict[str, Any]()
        scratch_size = dw_operands_end = 0
        dw_shape: tuple[int, ...] = ()
        dw_transposed = False
        if dw_gemm is not None:
            matmul = matmuls.weight_gradient
            a, b = dy_input, OperandInput(spec.x_shape_TK, dtypes.x, packed=True)
            # for a weight that is stored as (K, N), dw is computed as (K, N) too, or the weight's gradient would be a
            # copy. But with int16 codes the product is faster with x as b
            narrow = matmul.a.quantized_to.bits <= 8
            dw_transposed = narrow and dx_gemm is not None and matmuls.input_gradient.b.transposed
            if dw_transposed:
                matmul = matmul.transposed()
                a, b = b, a
            dw_shape = a.shape[1], b.shape[1]
            product = describe(self._codec, matmul, dw_gemm, a, b, dtypes.w, spec.stochastic)
            fields["weight_gradient"], dw_operands_end, scratch_size = product
        if dx_gemm is not None:  # behind dw's operands: dy is quantized for both at once
            matmul = matmuls.input_gradient
            w_input = OperandInput(spec.w_shape, dtypes.w)
            stochastic = spec.stochastic
            product = describe(self._codec, matmul, dx_gemm, dy_input, w_input, dtypes.x, stochastic, dw_operands_end)
            fields["input_gradient"] = product[0]
            scratch_size = max(scratch_size, product[2])
        desc = self._library.new("LinearBackwardDesc", fields)
        run = self._library.c.dsq_linear_backward
        dx_shape = tuple(spec.x_shape)

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            dy = dy.contiguous()
            memory = scratch(scratch_size)
            dx = dw = codes = scales = None
            dx_address = dw_address = 0
            if w is not None:
                w = w.contiguous()
                dx = torch.empty(*dx_shape, dtype=dtypes.x, device="cpu")
                dx_address = dx.data_ptr()
            if x is not None:
                codes, scales = x.codes.contiguous(), x.scales.contiguous()  # hooks may have changed their order
                dw = torch.empty(*dw_shape, dtype=dtypes.w, device="cpu")
                dw_address = dw.data_ptr()
            run(
                *(desc, *addresses(dy, w, codes, scales), dx_address, dw_address),
                *(memory.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK),
            )
            return dx, dw.t() if dw_transposed and dw is not None else dw

        return call


def _fuses(*matmuls: MatMul) -> bool:
    """Return whether src/linear.cpp quantizes to these formats."""
    formats = (fmt for matmul in matmuls for fmt in (matmul.a.format, matmul.b.format, matmul.result))
    return {type(fmt) for fmt in formats if fmt is not None} <= SCALES.keys()


def _multiply_by(
    gemm: str, spec: LinearSpec, desc: dict[str, Any]
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """Return a function (memory, bias, y) -> y, the product by a GEMM of PyTorch's. The quantized operands are in
    ``memory``, of the dtype of y, at the offsets in ``desc``. The function may write to its y, or allocate one."""
    transposed = spec.matmuls.output.b.transposed
    y_shape = spec.y_shape
    x_shape_TK, w_shape, y_shape_TN = spec.x_shape_TK, spec.w_shape, spec.y_shape_TN

    def operand(memory: Tensor, name: str, shape: torch.Size) -> Tensor:
        return memory.as_strided(shape, (shape[1], 1), desc[name]["offset"] // memory.itemsize)

    def multiply(memory: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        x0_TK, w0 = operand(memory, "a", x_shape_TK), operand(memory, "b", w_shape)
        w0_NK = w0 if transposed else w0.t().contiguous()  # the order of PyTorch's sums may depend on it
        if gemm == ONEDNN:
            product: Tensor = torch.ops.aten._unsafe_view(by_onednn(x0_TK, w0_NK, bias), y_shape)  # no view to autograd
            return product
        y_TN = y.view(y_shape_TN)
        if bias is None:
            torch.mm(x0_TK, w0_NK.t(), out=y_TN)
        else:
            torch.addmm(bias, x0_TK, w0_NK.t(), out=y_TN)
        return y

    return multiply
