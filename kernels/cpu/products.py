"""Products of quantized operands by the compiled kernels (src/gemm): products of values exact, sums in float32.

The kernel "bfloat16" multiplies operands that bfloat16 represents exactly (AVX512_BF16). For bfloat16 tensors, BFP of
any width is one. The kernel "amx" multiplies the same operands by AMX's tiles. No machine with AMX has run it: tests
emulate the tiles. Before its first use a few small products are compared with those in float64.

The kernel "integer" multiplies packed operands with blocks along the contraction, as hardware for the format does: an
exact integer dot product per block, then the scale factors of the blocks. It needs AVX512_VNNI, AVX-VNNI, AVX2, or
NEON's sdot for codes of at most 8 bits. Codes of at most 8 bits multiply as bytes (on AVX2, if the widths of both sum
to at most 13 bits), others as 16 bits. With AVX512_VNNI, narrower codes are shifted within their byte to one exponent,
so that one dot product covers 64 or 512 values of the contraction. The sums of 256 products of codes, shifted or not,
times the scale factors of either operand or both, must be within float32's range.

Callers have checked shapes, dtypes and codes (dsq.ops). Shape suffixes: M rows, N columns, K the contraction.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, Layout
from dsq.kernels.backend import Codes, GemmKernel, MatMul, Operand, Sizes, along_contraction
from dsq.kernels.conformance import Product, multiplies
from dsq.kernels.cpu.codec import SCALES, CodecKernels
from dsq.kernels.cpu.library import Library, library
from dsq.kernels.cpu.memory import Arena, addresses, scratch

#: values of a vector in a panel of int16 (src/gemm/integer/integer_packing.h), which a block must divide
_MAX_BLOCK_SIZE = 256
#: the name of PyTorch's other float32 product
ONEDNN = "onednn"


def bfloat16_gemm(library: Library, name: str) -> GemmKernel:
    bf16 = torch.bfloat16
    run = partial(_multiply_bfloat16, getattr(library.c, KERNELS[name]))
    return GemmKernel(name, library.fits_with(KERNELS[name], _fits_bfloat16), run, False, bf16, bf16)


def with_first_check(gemm: GemmKernel) -> GemmKernel:
    """Return ``gemm`` with a check before its first use: if a small product differs from the one in float64, a warning
    says so and the kernel fits no product."""

    @cache
    def conforms() -> bool:
        transpositions = (False, False), (False, True), (True, False)
        for (rows, depth, columns), transposed in itertools.product(((64, 320, 32), (37, 300, 45)), transpositions):
            product = Product(rows, depth, columns, along_contraction(BFP(9), BFP(9), transposed))
            if not multiplies(gemm, product, torch.device("cpu")):
                warnings.warn(f"dsq: the kernel {gemm.name!r} is not used: its {product} is wrong", stacklevel=3)
                return False
        return True

    return gemm._replace(fits=lambda *product: gemm.fits(*product) and conforms())


def _dot_product_size(block_size: int) -> int:
    """Return the number of values of one integer dot product: a block, or 16 if the tensor has one scale (0)."""
    return block_size or 16


def _fits_bfloat16(matmul: MatMul, dtype: torch.dtype) -> bool:
    a, b = matmul.a.format, matmul.b.format
    if not wants_exact(matmul, dtype) or a is None or b is None:
        return False
    stays_bfloat16 = dtype is torch.bfloat16 and isinstance(a, BFP) and a.packs  # of any width
    return (a.exact_in_bfloat16 or stays_bfloat16) and b.exact_in_bfloat16


def fits_integer(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Return whether both operands have equal blocks along the contraction that divide a panel (or one scale each),
    codes of a width that this machine multiplies, and block sums that fit 32 bits."""
    a, b = matmul.a.format, matmul.b.format
    if not wants_exact(matmul, dtype) or a is None or b is None or not {type(a), type(b)} <= SCALES.keys():
        return False
    block_size = _dot_product_size(a.block_size)
    supported = _MAX_BLOCK_SIZE % block_size == 0 and library().c.dsq_gemm_integer_fits(a.bits, b.bits, block_size)
    sums_fit = a.packs and b.packs and a.smallest_code * b.smallest_code * block_size < 1 << 31
    return bool(supported) and sums_fit and matmul.blocks_match()


def by_onednn(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return ``a b^T + bias`` in float32."""
    a, b = a_MK.contiguous(), b_NK.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias_N, "none", [], "")
    return y


def wants_exact(matmul: MatMul, dtype: torch.dtype) -> bool:
    return matmul.exact and dtype is not torch.float64


def _multiply_bfloat16(kernel: int, _: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return ``a b + bias`` of bfloat16 values in float32. ``kernel`` is of ``enum GemmKernel``."""
    c = library().c
    sizes = (a_MK.shape[0], b_KN.shape[1], a_MK.shape[1])
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    a_address, b_address = addresses(a, b, strided=True)
    operands = kernel, a_address, *a.stride(), b_address, *b.stride()
    return _run_gemm(sizes, bias_N, c.dsq_gemm_bfloat16, operands, c.dsq_gemm_bfloat16_scratch(kernel, *sizes))


class ElementCodes(NamedTuple):
    """Codes that are no integers: elements of a grid, which multiply as integers in the unit of its finest step."""

    digits: int  #: 0: they are integers
    bits: int  #: of a code


INTEGERS = ElementCodes(0, 0)


def multiply_packed(
    matmul: MatMul,
    a: Codes,
    b: Codes,
    bias_N: Tensor | None,
    a_elements: ElementCodes = INTEGERS,
    b_elements: ElementCodes = INTEGERS,
) -> Tensor:
    """Return ``a b + bias`` of packed operands in float32. ``a_elements``, ``b_elements``: what the codes are."""
    a_format, b_format = matmul.a.quantized_to, matmul.b.quantized_to
    a_axis, b_axis = matmul.contracted()
    c = library().c
    sizes = matmul.sizes(a.shape, b.shape)
    a, b = (x._replace(codes=x.codes.contiguous(), scales=x.scales.contiguous()) for x in (a, b))
    one_scale = a_format.block_size == 0
    block_size = _dot_product_size(a_format.block_size)
    a_arguments = *_packed_arguments(a, matmul.a, a_axis), *a_elements
    b_arguments = *_packed_arguments(b, matmul.b, b_axis), *b_elements
    operands = *a_arguments, *b_arguments, one_scale, block_size
    scratch_size = c.dsq_gemm_integer_scratch(*sizes, a_format.bits, b_format.bits, block_size)
    return _run_gemm(sizes, bias_N, c.dsq_gemm_integer, operands, scratch_size)


def _packed_arguments(x: Codes, operand: Operand, axis: int) -> tuple[int, ...]:
    """Return the addresses of codes and scales, the kind of scales, the bits of a code, and whether a row of codes has
    one index of the contraction."""
    kind = getattr(library().c, SCALES[type(operand.quantized_to)])
    return *addresses(x.codes, x.scales), kind, operand.quantized_to.bits, int(axis == 0)


def _run_gemm(
    sizes: Sizes, bias: Tensor | None, gemm: Callable[..., None], operands: tuple[int, ...], scratch_size: int
) -> Tensor:
    """Return the product of ``operands`` by ``gemm`` with ``scratch_size`` bytes of scratch memory."""
    rows, columns, _ = sizes
    y = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if 0 in sizes:
        return y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    bias = None if bias is None else bias.contiguous()
    panels = scratch(scratch_size)
    gemm(*operands, *addresses(bias), y.data_ptr(), *sizes, panels.data_ptr(), torch.get_num_threads())
    return y


# ---- a product as a MatMulDesc (src/linear.cpp): its operands, and their places in scratch memory

#: the name of a GemmKernel -> that in enum GemmKernel; any other is a product of PyTorch's
KERNELS = {"bfloat16": "GEMM_BFLOAT16", "amx": "GEMM_AMX", "integer": "GEMM_INTEGER"}


class OperandInput(NamedTuple):
    """An operand in the form in which the caller passes it."""

    shape: torch.Size
    dtype: torch.dtype  #: of the values before they are quantized
    packed: bool = False  #: as codes


def describe(
    codec: CodecKernels, matmul: MatMul, gemm: str, a: OperandInput, b: OperandInput, dtype: torch.dtype,
    stochastic: bool, start: int = 0,
) -> tuple[dict[str, Any], int, int]:  # fmt: skip
    """Return the fields of a MatMulDesc whose operands ``codec`` quantizes, and two offsets in scratch memory: the end
    of its operands, and the end of all that it uses. ``dtype`` is that of the result. ``start`` is the first byte of
    scratch memory that it may use."""
    c = codec.library.c
    arena = Arena(start)
    values = torch.bfloat16 if gemm in KERNELS else dtype
    a_axis, b_axis = matmul.contracted()
    sizes = rows, columns, depth = matmul.sizes(a.shape, b.shape)
    fields = {
        "a": _operand(codec, matmul.a, a, values, gemm, arena, stochastic) | {"across": a_axis == 0},
        "b": _operand(codec, matmul.b, b, values, gemm, arena, stochastic) | {"across": b_axis == 0},
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "gemm": getattr(c, KERNELS.get(gemm, "GEMM_TORCH")),
        "result": {"out_dtype": codec.library.dtypes()[dtype]},
    }
    operands_end = arena.size
    if gemm == "integer":
        a_format, b_format = matmul.a.quantized_to, matmul.b.quantized_to
        fields["block_size"] = block_size = _dot_product_size(a_format.block_size)
        size = c.dsq_gemm_integer_scratch(*sizes, a_format.bits, b_format.bits, block_size)
        fields["panels_offset"] = arena.allocate(size)
    elif gemm in KERNELS:
        fields["panels_offset"] = arena.allocate(c.dsq_gemm_bfloat16_scratch(fields["gemm"], *sizes))
    if matmul.result is not None:
        layout = Layout(1, rows, columns, along_rows=False)
        fields["result"] = codec.fields(matmul.result, layout, torch.float32, dtype, stochastic)
        fields["result_seed"] = matmul.result_seed
        fields["result_offset"] = 0 if dtype is torch.float32 else arena.allocate(4 * rows * columns)
    return fields, operands_end, arena.size


def _operand(
    codec: CodecKernels,
    operand: Operand,
    x: OperandInput,
    values: torch.dtype,
    gemm: str,
    arena: Arena,
    stochastic: bool,
) -> dict[str, Any]:
    """Return the fields of an OperandDesc other than ``across``. ``values``: the dtype that ``gemm`` multiplies, or
    codes."""
    fmt = operand.quantized_to
    layout = Layout.of(x.shape, operand.axis)
    strides = (x.shape[1], 1)
    row_stride, column_stride = strides[::-1] if operand.transposed else strides
    fields = {
        "codec": codec.fields(fmt, layout, values if x.packed else x.dtype, values, stochastic),
        "row_stride": row_stride,
        "column_stride": column_stride,
        "seed": operand.seed,
        "packed": x.packed,
    }
    if gemm != "integer":
        fields["offset"] = arena.allocate(values.itemsize * x.shape.numel())
    elif not x.packed:
        fields["offset"] = arena.allocate(math.prod(layout.code_shape(fmt.bits)))
        fields["scales_offset"] = arena.allocate(math.prod(fmt.scale_shape(layout)))
    return fields
