"""The passes of a linear layer by the compiled kernels, each in one call (src/linear.cpp).

For a small layer separate calls cost more than their work. What lies between the kernels stays in memory that is kept.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import Layout
from dsq.kernels.backend import BackwardCall, Codes, Dtypes, ForwardCall, LinearMatMuls, MatMul, Operand
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.memory import addresses, scratch
from dsq.kernels.cpu.products import KERNELS, ONEDNN, Given, MatMulDescriber, by_onednn


class _Backward(NamedTuple):
    """What one call computes."""

    fields: dict[str, Any]  #: of a LinearBackwardDesc
    room: int  #: bytes of scratch memory
    dx_shape: tuple[int, ...]
    dw_shape: tuple[int, ...]
    dw_transposed: bool  #: it is computed as (K, N), as the weight is stored


class LinearKernels:
    """FusedLinear (kernels/backend.py) by the instruction set of ``codec``."""

    def __init__(self, library: Library, codec: CodecKernels) -> None:
        self._library, self._codec = library, codec
        self._describe = MatMulDescriber(library, codec).describe

    def forward(
        self,
        matmuls: LinearMatMuls,
        gemm: str,
        dtypes: Dtypes,
        x_shape: torch.Size,
        w_shape: torch.Size,
        stochastic: bool,
    ) -> ForwardCall | None:
        by_torch = gemm not in KERNELS
        if by_torch and matmuls.output.result is not None:
            return None
        shape_TK = _matrix(x_shape)
        output, _, room = self._describe(
            matmuls.output, gemm, Given(shape_TK, dtypes.x), Given(w_shape, dtypes.w), dtypes.y, stochastic
        )
        stash, code_shape, scale_shape = self._stash(matmuls.stash, shape_TK, dtypes.x, stochastic)
        desc = self._library.new("LinearForwardDesc", {"output": output} | stash)
        run = self._library.c.dsq_linear_forward
        y_shape = (*x_shape[:-1], matmuls.output.sizes(shape_TK, w_shape)[1])
        bias_dtype = dtypes.y if by_torch else torch.float32
        multiply = _multiply_by(gemm, matmuls.output, output, shape_TK, w_shape, y_shape) if by_torch else None

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
                packed = Codes(codes, scales, shape_TK)
            run(
                *(desc, *addresses(x, w, bias), y.data_ptr(), codes_address, scales_address),
                *(memory.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK),
            )
            return y if multiply is None else multiply(memory, bias, y), packed

        return call

    def _stash(
        self, stash: Operand, shape_TK: torch.Size, dtype: torch.dtype, stochastic: bool
    ) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
        """The fields of a LinearForwardDesc that pack x, and the shapes of codes and scales; none without a format."""
        if stash.format is None:
            return {}, (), ()
        layout = Layout.of(shape_TK, stash.axis)
        codec = self._codec.fields(stash.format, layout, dtype, dtype, stochastic)
        shapes = layout.code_shape(stash.format.bits), stash.format.scale_shape(layout)
        return {"stash": codec, "stash_seed": stash.seed}, *shapes

    def backward(
        self,
        matmuls: LinearMatMuls,
        gemms: tuple[str, str],
        dtypes: Dtypes,
        dy_shape: torch.Size,
        w_shape: torch.Size | None,
        x_shape: torch.Size | None,
        stochastic: bool,
    ) -> BackwardCall | None:
        wanted = (gemm for gemm, shape in zip(gemms, (w_shape, x_shape), strict=True) if shape is not None)
        if any(gemm not in KERNELS for gemm in wanted):
            return None
        fields, room, dx_shape, dw_shape, dw_transposed = self._backward(
            matmuls, gemms, dtypes, dy_shape, w_shape, x_shape, stochastic
        )
        desc, run = self._library.new("LinearBackwardDesc", fields), self._library.c.dsq_linear_backward

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

    def _backward(
        self,
        matmuls: LinearMatMuls,
        gemms: tuple[str, str],
        dtypes: Dtypes,
        dy_shape: torch.Size,
        w_shape: torch.Size | None,
        x_shape: torch.Size | None,
        stochastic: bool,
    ) -> _Backward:
        shape_TN, fields, room, after = _matrix(dy_shape), dict[str, Any](), 0, 0
        dx_shape: tuple[int, ...] = ()
        dw_shape: tuple[int, ...] = ()
        dw_transposed = False
        if x_shape is not None:
            matmul, dy, x = matmuls.weight_gradient, Given(shape_TN, dtypes.y), Given(x_shape, dtypes.x, packed=True)
            assert matmul.a.format is not None
            # of a weight that is stored as (K, N) dw is made so too, or the weight's gradient would be a copy; but as
            # int16, codes of x are multiplied faster as b
            dw_transposed = w_shape is not None and matmuls.input_gradient.b.transposed and matmul.a.format.bits <= 8
            matmul, a, b = (matmul.transposed(), x, dy) if dw_transposed else (matmul, dy, x)
            dw_shape = a.shape[1], b.shape[1]
            fields["weight_gradient"], after, room = self._describe(matmul, gemms[1], a, b, dtypes.w, stochastic)
        if w_shape is not None:
            matmul, dy, w = matmuls.input_gradient, Given(shape_TN, dtypes.y), Given(w_shape, dtypes.w)
            dx_shape = (*dy_shape[:-1], matmul.sizes(shape_TN, w_shape)[1])
            # behind dw's operands: dy is quantised for both at once
            described = self._describe(matmul, gemms[0], dy, w, dtypes.x, stochastic, start=after)
            fields["input_gradient"], room = described.fields, max(room, described.end)
        return _Backward(fields, room, dx_shape, dw_shape, dw_transposed)


def _multiply_by(
    gemm: str,
    matmul: MatMul,
    desc: dict[str, Any],
    x_shape: torch.Size,
    w_shape: torch.Size,
    y_shape: tuple[int, ...],
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """(memory, bias, y) -> y, perhaps the given one: the product by a GEMM of PyTorch's, of the operands that lie
    quantised in ``memory``, of the dtype of y, where ``desc`` says."""

    def operand(memory: Tensor, name: str, shape: torch.Size) -> Tensor:
        return memory.as_strided(shape, (shape[1], 1), desc[name]["offset"] // memory.itemsize)

    def multiply(memory: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        x0_TK, w0 = operand(memory, "a", x_shape), operand(memory, "b", w_shape)
        w0_NK = w0 if matmul.b.transposed else w0.t().contiguous()  # the order of PyTorch's sums may depend on it
        if gemm == ONEDNN:
            made: Tensor = torch.ops.aten._unsafe_view(by_onednn(x0_TK, w0_NK, bias), y_shape)  # no view to autograd
            return made
        y_TN = y.view(x_shape[0], y_shape[-1])
        if bias is None:
            torch.mm(x0_TK, w0_NK.t(), out=y_TN)
        else:
            torch.addmm(bias, x0_TK, w0_NK.t(), out=y_TN)
        return y

    return multiply


def _matrix(shape: torch.Size) -> torch.Size:
    """(..., N) as (T, N)."""
    return torch.Size((math.prod(shape[:-1]), shape[-1]))
