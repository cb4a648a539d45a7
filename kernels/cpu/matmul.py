"""A quantised matrix product as a MatMulDesc (src/linear.cpp): its operands, and where they lie in scratch memory."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsq.formats import Layout
from dsq.kernels.backend import MatMul, Operand
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.gemm import summed_as_integers
from dsq.kernels.cpu.library import Library
from dsq.kernels.cpu.scratch import Arena

#: a GemmKernel's name in enum GemmKernel; any other is one of PyTorch's
KERNELS = {"bfloat16": "GEMM_BFLOAT16", "integer": "GEMM_INTEGER"}


class Given(NamedTuple):
    """An operand as the caller has it."""

    shape: torch.Size
    dtype: torch.dtype  #: of the values before they are quantised
    packed: bool = False  #: it comes as codes


class Described(NamedTuple):
    """A product's descriptor, and what it takes of scratch memory."""

    fields: dict[str, Any]  #: of a MatMulDesc
    operands_end: int  #: byte
    end: int  #: byte


@dataclass(frozen=True)
class MatMulDescriber:
    """Describes products to the library, their operands quantised by ``codec``."""

    library: Library
    codec: CodecKernels

    def describe(
        self, matmul: MatMul, gemm: str, a: Given, b: Given, dtype: torch.dtype, stochastic: bool, start: int = 0
    ) -> Described:
        """``dtype``: of the result. ``start``: the first byte of scratch memory that it may take."""
        arena = Arena(start)
        values = torch.bfloat16 if gemm in KERNELS else dtype
        a_axis, b_axis = matmul.contracted()
        rows, columns, depth = matmul.sizes(a.shape, b.shape)
        fields = {
            "a": self._operand(matmul.a, a, values, gemm, arena, stochastic) | {"across": a_axis == 0},
            "b": self._operand(matmul.b, b, values, gemm, arena, stochastic) | {"across": b_axis == 0},
            "rows": rows,
            "columns": columns,
            "depth": depth,
            "gemm": getattr(self.library.c, KERNELS.get(gemm, "GEMM_TORCH")),
            "result": {"out_dtype": self.library.dtypes()[dtype]},
        }
        operands_end = arena.size
        if gemm == "integer":
            assert matmul.a.format is not None
            fields["box"] = box = summed_as_integers(matmul.a.format.box)
            panels = self.library.c.dsq_gemm_integer_scratch(rows, columns, depth, box)
            fields["panels_offset"] = arena.take(panels)
        elif gemm == "bfloat16":
            panels = self.library.c.dsq_gemm_bfloat16_scratch(rows, columns, depth)
            fields["panels_offset"] = arena.take(panels)
        if matmul.result is not None:
            layout = Layout(1, rows, columns, along_rows=False)
            fields["result"] = self.codec.fields(matmul.result, layout, torch.float32, dtype, stochastic)
            fields["result_seed"] = matmul.result_seed
            fields["result_offset"] = 0 if dtype is torch.float32 else arena.take(4 * rows * columns)
        return Described(fields, operands_end, arena.size)

    def _operand(
        self, operand: Operand, given: Given, values: torch.dtype, gemm: str, arena: Arena, stochastic: bool
    ) -> dict[str, Any]:
        """The fields of an OperandDesc but one; ``values``: what ``gemm`` multiplies, where it takes no codes."""
        assert operand.format is not None
        layout = Layout.of(given.shape, operand.axis)
        strides = (given.shape[1], 1)
        row_stride, column_stride = strides[::-1] if operand.transposed else strides
        dtype = values if given.packed else given.dtype
        fields = {
            "codec": self.codec.fields(operand.format, layout, dtype, values, stochastic),
            "row_stride": row_stride,
            "column_stride": column_stride,
            "seed": operand.seed,
            "packed": given.packed,
        }
        if gemm != "integer":
            fields["offset"] = arena.take(values.itemsize * given.shape.numel())
        elif not given.packed:
            fields["offset"] = arena.take(math.prod(layout.code_shape(operand.format.bits)))
            fields["scales_offset"] = arena.take(math.prod(operand.format.scale_shape(layout)))
        return fields
