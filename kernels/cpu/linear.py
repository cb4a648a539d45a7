"""The passes of a linear layer by the compiled kernels, each in one call (src/linear.cpp).

For a small layer separate calls cost more than their work. What lies between the kernels stays in memory that is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsq.formats import Layout
from dsq.kernels.backend import BackwardCall, Codes, ForwardCall, Layer
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.library import SEED_MASK
from dsq.kernels.cpu.memory import addresses, scratch
from dsq.kernels.cpu.products import KERNELS, ONEDNN, Given, by_onednn, describe


class LinearKernels:
    """FusedLinear (kernels/backend.py) by the instruction set of ``codec``."""

    def __init__(self, codec: CodecKernels) -> None:
        self._library, self._codec = codec.library, codec

    def forward(self, layer: Layer, gemm: str) -> ForwardCall | None:
        matmul, dtypes, x_matrix, y_shape = layer.matmuls.output, layer.dtypes, layer.x_matrix, layer.y_shape
        by_torch = gemm not in KERNELS
        if by_torch and matmul.result is not None:
            return None
        x_given, w_given = Given(x_matrix, dtypes.x), Given(layer.w_shape, dtypes.w)
        output, _, room = describe(self._codec, matmul, gemm, x_given, w_given, dtypes.y, layer.stochastic)
        stash, code_shape, scale_shape = self._stash(layer)
        desc = self._library.new("LinearForwardDesc", {"output": output} | stash)
        run = self._library.c.dsq_linear_forward
        bias_dtype = dtypes.y if by_torch else torch.float32
        multiply = _multiply_by(gemm, layer, output) if by_torch else None

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x, w = x.contiguous(), w.contiguous()
            bias = None if bias is None else bias.to(bias_dtype).contiguous()
            made = (0,) if gemm == ONEDNN else y_shape  # oneDNN makes y itself
            y = torch.empty(made, dtype=dtypes.y, device="cpu")  # whatever the defaults are
            # values are large: their memory is freed here, so that the stash can have it
            memory = torch.empty(room // y.itemsize, dtype=dtypes.y, device="cpu") if by_torch else scratch(room)
            packed, codes_address, scales_address = None, 0, 0
            if packing:
                codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
                scales = torch.empty(*scale_shape, dtype=torch.uint8, device="cpu")
                codes_address, scales_address = codes.data_ptr(), scales.data_ptr()
                packed = Codes(codes, scales, x_matrix)
            run(
                *(desc, *addresses(x, w, bias), y.data_ptr(), codes_address, scales_address),
                *(memory.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK),
            )
            return y if multiply is None else multiply(memory, bias, y), packed

        return call

    def _stash(self, layer: Layer) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
        """The fields of a LinearForwardDesc that pack x, and the shapes of codes and scales."""
        stash, dtype = layer.matmuls.stash, layer.dtypes.x
        fmt, layout = stash.quantized_to, Layout.of(layer.x_matrix, stash.axis)
        codec = self._codec.fields(fmt, layout, dtype, dtype, layer.stochastic)
        return {"stash": codec, "stash_seed": stash.seed}, layout.code_shape(fmt.bits), fmt.scale_shape(layout)

    def backward(self, layer: Layer, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        if any(gemm not in KERNELS for gemm in gemms if gemm is not None):
            return None
        (dx_gemm, dw_gemm), matmuls, dtypes = gemms, layer.matmuls, layer.dtypes
        dy_given, fields, room, after = Given(layer.y_matrix, dtypes.y), dict[str, Any](), 0, 0
        dw_shape: tuple[int, ...] = ()
        dw_transposed = False
        if dw_gemm is not None:
            matmul, a, b = matmuls.weight_gradient, dy_given, Given(layer.x_matrix, dtypes.x, packed=True)
            # of a weight that is stored as (K, N) dw is made so too, or the weight's gradient would be a copy; but as
            # int16, codes of x are multiplied faster as b
            narrow = matmul.a.quantized_to.bits <= 8
            dw_transposed = narrow and dx_gemm is not None and matmuls.input_gradient.b.transposed
            if dw_transposed:
                matmul, a, b = matmul.transposed(), b, a
            dw_shape = a.shape[1], b.shape[1]
            made = describe(self._codec, matmul, dw_gemm, a, b, dtypes.w, layer.stochastic)
            fields["weight_gradient"], after, room = made
        if dx_gemm is not None:  # behind dw's operands: dy is quantized for both at once
            matmul, w_given = matmuls.input_gradient, Given(layer.w_shape, dtypes.w)
            made = describe(self._codec, matmul, dx_gemm, dy_given, w_given, dtypes.x, layer.stochastic, after)
            fields["input_gradient"], room = made[0], max(room, made[2])
        desc, run = self._library.new("LinearBackwardDesc", fields), self._library.c.dsq_linear_backward
        dx_shape = tuple(layer.x_shape)

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            dy, memory, dx_address, dw_address = dy.contiguous(), scratch(room), 0, 0
            dx = dw = codes = scales = None
            if w is not None:
                w, dx = w.contiguous(), torch.empty(*dx_shape, dtype=dtypes.x, device="cpu")
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


def _multiply_by(gemm: str, layer: Layer, desc: dict[str, Any]) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """(memory, bias, y) -> y, perhaps the given one: the product by a GEMM of PyTorch's, of the operands that lie
    quantized in ``memory``, of the dtype of y, where ``desc`` says."""
    transposed, y_shape = layer.matmuls.output.b.transposed, layer.y_shape
    x_matrix, w_shape, y_matrix = layer.x_matrix, layer.w_shape, layer.y_matrix

    def operand(memory: Tensor, name: str, shape: torch.Size) -> Tensor:
        return memory.as_strided(shape, (shape[1], 1), desc[name]["offset"] // memory.itemsize)

    def multiply(memory: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        x0_TK, w0 = operand(memory, "a", x_matrix), operand(memory, "b", w_shape)
        w0_NK = w0 if transposed else w0.t().contiguous()  # the order of PyTorch's sums may depend on it
        if gemm == ONEDNN:
            made: Tensor = torch.ops.aten._unsafe_view(by_onednn(x0_TK, w0_NK, bias), y_shape)  # no view to autograd
            return made
        y_TN = y.view(y_matrix)
        if bias is None:
            torch.mm(x0_TK, w0_NK.t(), out=y_TN)
        else:
            torch.addmm(bias, x0_TK, w0_NK.t(), out=y_TN)
        return y

    return multiply
