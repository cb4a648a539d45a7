"""Products of quantized operands by the compiled kernels (src/gemm): products of values exact, sums in float32.

bfloat16 takes operands that bfloat16 holds exactly (AVX512_BF16): of bfloat16 tensors BFP of any width. integer takes
packed operands with blocks along the contraction: an exact integer dot product a block, then the blocks' scale factors,
as hardware for the format computes it (AVX512_VNNI; AVX-VNNI; AVX2; NEON's sdot, codes of at most 8 bits). Codes of at
most 8 bits multiply as bytes, on AVX2 those of at most 13 bits together, others as 16 bits. With AVX512_VNNI, where a
byte has room to shift narrower codes to one exponent, one dot product takes 64 or 512 values of the contraction. The
sums of 256 products of codes, shifted or not, times the scale factors of either operand or both, have to be within
float32's range.

What calls these functions has checked shapes, dtypes and codes (dsq.ops). Shape suffixes: M rows, N columns, K the
contraction.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, Layout
from dsq.kernels.backend import Codes, GemmKernel, MatMul, Operand, Sizes
from dsq.kernels.cpu.codec import SCALES, CodecKernels
from dsq.kernels.cpu.library import Library, library
from dsq.kernels.cpu.memory import Arena, addresses, scratch
from dsq.kernels.reference.backend import TORCH

#: values of a vector in a panel of int16 (src/gemm/integer_packing.h); a block has to divide it
_MAX_BLOCK_SIZE = 256
#: the name of PyTorch's other float32 product
ONEDNN = "onednn"


def gemms(library: Library) -> tuple[GemmKernel, ...]:
    """The kernels of ``library``, and for what they do not take PyTorch's matmul and the one of its oneDNN: on CPUs of
    other makers PyTorch's, by Intel's MKL, may leave the widest units idle; a small product it starts sooner."""
    has_bfloat16, has_integer = library.has_gemm("GEMM_BFLOAT16"), library.has_gemm("GEMM_INTEGER")
    bf16 = torch.bfloat16
    return (
        GemmKernel("bfloat16", lambda *given: has_bfloat16 and _fits_bfloat16(*given), _bfloat16, False, bf16, bf16),
        GemmKernel("integer", lambda *given: has_integer and _fits_integer(*given), _integer, packed=True),
        TORCH,
        GemmKernel(ONEDNN, _fits_onednn, lambda _, a_MK, b_KN, bias_N: by_onednn(a_MK, b_KN.t(), bias_N)),
    )


def _summed_as_integers(block_size: int) -> int:
    """Values of one integer dot product: a block, or some number where one scale serves the tensor (0)."""
    return block_size or 16


def _fits_bfloat16(matmul: MatMul, dtype: torch.dtype) -> bool:
    a, b = matmul.a.format, matmul.b.format
    if not _exact(matmul, dtype) or a is None or b is None:
        return False
    kept = dtype is torch.bfloat16 and isinstance(a, BFP) and a.packs  # on whose grid a bfloat16 value stays one
    return (a.exact_in_bfloat16 or kept) and b.exact_in_bfloat16


def _fits_integer(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Both operands have the same blocks, which run along the contraction (or one scale each) and divide a panel, codes
    of a width that this machine multiplies, and a block's sum fits 32 bits."""
    a, b = matmul.a.format, matmul.b.format
    if not _exact(matmul, dtype) or a is None or b is None or not {type(a), type(b)} <= SCALES.keys():
        return False
    block_size = _summed_as_integers(a.block_size)
    takes = _MAX_BLOCK_SIZE % block_size == 0 and library().c.dsq_gemm_integer_fits(a.bits, b.bits, block_size)
    fits = a.packs and b.packs and a.smallest_code * b.smallest_code * block_size < 1 << 31
    return bool(takes) and fits and matmul.blocks_match()


def _fits_onednn(matmul: MatMul, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and torch.backends.mkldnn.is_available()


def by_onednn(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """``a b^T + bias``, in float32."""
    a, b = a_MK.contiguous(), b_NK.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias_N, "none", [], "")
    return y


def _exact(matmul: MatMul, dtype: torch.dtype) -> bool:
    return matmul.exact and dtype is not torch.float64


def _bfloat16(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` of bfloat16 values, in float32."""
    sizes, c = (a_MK.shape[0], b_KN.shape[1], a_MK.shape[1]), library().c
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    a_at, b_at = addresses(a, b, strided=True)
    operands = a_at, *a.stride(), b_at, *b.stride()
    return _written(sizes, bias_N, c.dsq_gemm_bfloat16, operands, c.dsq_gemm_bfloat16_scratch(*sizes))


def _integer(matmul: MatMul, a: Codes, b: Codes, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` of packed operands, in float32."""
    one, other = matmul.a.quantized_to, matmul.b.quantized_to
    a_axis, b_axis = matmul.contracted()
    sizes, c = matmul.sizes(a.shape, b.shape), library().c
    a, b = (x._replace(codes=x.codes.contiguous(), scales=x.scales.contiguous()) for x in (a, b))
    one_scale, block_size = one.block_size == 0, _summed_as_integers(one.block_size)
    operands = (*_packed(a, matmul.a, a_axis), *_packed(b, matmul.b, b_axis), one_scale, block_size)
    room = c.dsq_gemm_integer_scratch(*sizes, one.bits, other.bits, block_size)
    return _written(sizes, bias_N, c.dsq_gemm_integer, operands, room)


def _packed(x: Codes, operand: Operand, axis: int) -> tuple[int, ...]:
    """The addresses of codes and scales, what these are, bits, and whether a row of codes holds one index of the
    contraction."""
    kind = getattr(library().c, SCALES[type(operand.quantized_to)])
    return *addresses(x.codes, x.scales), kind, operand.quantized_to.bits, int(axis == 0)


def _written(
    sizes: Sizes, bias: Tensor | None, gemm: Callable[..., None], operands: tuple[int, ...], room: int
) -> Tensor:
    """Return the product of ``operands``, none of them empty, by ``gemm`` with ``room`` bytes of scratch memory."""
    rows, columns, _ = sizes
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if 0 in sizes:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    bias = None if bias is None else bias.contiguous()
    panels = scratch(room)
    gemm(*operands, *addresses(bias), out.data_ptr(), *sizes, panels.data_ptr(), torch.get_num_threads())
    return out


# ---- a product as a MatMulDesc (src/linear.cpp): its operands, and where they lie in scratch memory

#: a GemmKernel's name in enum GemmKernel; any other is one of PyTorch's
KERNELS = {"bfloat16": "GEMM_BFLOAT16", "integer": "GEMM_INTEGER"}


class Given(NamedTuple):
    """An operand as the caller has it."""

    shape: torch.Size
    dtype: torch.dtype  #: of the values before they are quantized
    packed: bool = False  #: it comes as codes


def describe(
    codec: CodecKernels, matmul: MatMul, gemm: str, a: Given, b: Given, dtype: torch.dtype, stochastic: bool,
    start: int = 0,
) -> tuple[dict[str, Any], int, int]:  # fmt: skip
    """The fields of a MatMulDesc whose operands ``codec`` quantizes, and the bytes of scratch memory at which its
    operands end, and all that it takes. ``dtype``: of the result. ``start``: the first byte that it may take."""
    c, arena, values = codec.library.c, Arena(start), torch.bfloat16 if gemm in KERNELS else dtype
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
        one, other = matmul.a.quantized_to, matmul.b.quantized_to
        fields["block_size"] = block_size = _summed_as_integers(one.block_size)
        fields["panels_offset"] = arena.take(c.dsq_gemm_integer_scratch(*sizes, one.bits, other.bits, block_size))
    elif gemm == "bfloat16":
        fields["panels_offset"] = arena.take(c.dsq_gemm_bfloat16_scratch(*sizes))
    if matmul.result is not None:
        layout = Layout(1, rows, columns, along_rows=False)
        fields["result"] = codec.fields(matmul.result, layout, torch.float32, dtype, stochastic)
        fields["result_seed"] = matmul.result_seed
        fields["result_offset"] = 0 if dtype is torch.float32 else arena.take(4 * rows * columns)
    return fields, operands_end, arena.size


def _operand(
    codec: CodecKernels, operand: Operand, given: Given, values: torch.dtype, gemm: str, arena: Arena, stochastic: bool
) -> dict[str, Any]:
    """The fields of an OperandDesc but one; ``values``: what ``gemm`` multiplies, where it takes no codes."""
    fmt, layout = operand.quantized_to, Layout.of(given.shape, operand.axis)
    strides = (given.shape[1], 1)
    row_stride, column_stride = strides[::-1] if operand.transposed else strides
    fields = {
        "codec": codec.fields(fmt, layout, values if given.packed else given.dtype, values, stochastic),
        "row_stride": row_stride,
        "column_stride": column_stride,
        "seed": operand.seed,
        "packed": given.packed,
    }
    if gemm != "integer":
        fields["offset"] = arena.take(values.itemsize * given.shape.numel())
    elif not given.packed:
        fields["offset"] = arena.take(math.prod(layout.code_shape(fmt.bits)))
        fields["scales_offset"] = arena.take(math.prod(fmt.scale_shape(layout)))
    return fields
