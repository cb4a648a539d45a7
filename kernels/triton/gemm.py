"""The ways to multiply on a GPU's tensor cores, with exact products and sums in float32.

Values, in bfloat16, by PyTorch: one of at most 8 significant bits is exact there; one of 9 to 16 bits in a (the
gradient at a wide q3) is the sum of two such parts, which makes two products.

Packed codes of at most 8 bits, as int8 (int8_kernels.py), with boxes along the contraction or one scale each. If the
boxes of RUN values of the contraction fit one step after an exact shift, in every vector of a tile, one integer dot
product takes them all; else it takes a box, and the products of steps cost more than those of codes. Not fp8, which
would gain nothing: E4M3 holds codes of up to 5 bits, and Hopper multiplies it at the rate of int8, but its sums keep
about 14 bits (DeepSeek-V3, section 3.3.2): those of a box of 16 are exact, those of a shifted run not.

Shape suffixes: M rows, N columns, K the contraction.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsq.formats import Format, Layout
from dsq.kernels.backend import DTYPES, Codes, GemmKernel, MatMul, Operand
from dsq.kernels.reference.backend import TORCH
from dsq.kernels.triton import int8_kernels as kernels
from dsq.kernels.triton.codec import GRIDS, grid_of, word_of

Fits = Callable[[Format | None], bool]


def _exact(a: Fits, b: Fits, dtypes: tuple[torch.dtype, ...]) -> Callable[[MatMul, torch.dtype], bool]:
    """Whether products are exact if the formats of both operands fit."""

    def fits(matmul: MatMul, dtype: torch.dtype) -> bool:
        wanted = matmul.exact and dtype in dtypes and a(matmul.a.format) and b(matmul.b.format)
        return wanted and torch.cuda.is_bf16_supported(including_emulation=False)

    return fits


@cache
def _has_int8() -> bool:
    """Whether Triton multiplies int8 on this GPU: from compute capability 8.0 on, on all of AMD's, and interpreted."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _narrow(fmt: Format | None) -> bool:
    return fmt is not None and fmt.exact_in_bfloat16


def _two_parts(fmt: Format | None) -> bool:
    """Whether the significand is that of two bfloat16 values: each holds 8 bits, the second one signed."""
    return fmt is not None and fmt.significand_bits <= 15


def matmul_bf16(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    product = torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return product if bias_N is None else product.add_(bias_N)


def _in_parts(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    high, low = split(a_MK)
    return matmul_bf16(matmul, high, b_KN, bias_N) + matmul_bf16(matmul, low, b_KN, None)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum is ``x``: 16 bits are a sign and 15 more, and each part holds 8."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


# ---- packed codes as int8

#: values of the contraction that one integer dot product takes at most
RUN = 128
#: boxes that divide a run; 0: one scale serves the tensor
BOXES = (0, 16, 32, 64, 128)
#: vectors of an operand are padded to a multiple of the largest tile's
VECTORS = 128
#: vectors of a tile of ``expand``, by whether a row of codes holds one index of the contraction
EXPAND = {False: {"V": 32, "num_warps": 4}, True: {"V": 128, "num_warps": 8}}
#: rows and columns of the product that a program of ``multiply`` computes, and its warps
TILES = ((128, 128, 8), (128, 64, 4), (64, 64, 4))


class _Vectors(NamedTuple):
    """An operand as ``multiply`` takes it."""

    codes: Tensor  #: (vectors, depth) int8, both padded
    steps: Tensor  #: (boxes, vectors) float32
    apart: Tensor | None  #: (vectors,) int32: runs that were not brought to one step; None: none was tried


def _fits_int8(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Whether codes are exact as bytes and have boxes that the kernels take."""
    a, b = matmul.a.format, matmul.b.format
    if not matmul.exact or dtype not in DTYPES or a is None or b is None or not {type(a), type(b)} <= GRIDS.keys():
        return False
    return max(a.bits, b.bits) <= 8 and a.box in BOXES and matmul.boxes_match() and _has_int8()


def _run(tile: tuple[int, int, int], matmul: MatMul, a: Codes, b: Codes, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` in float32. Raises ValueError for codes and scales of other shapes or dtypes."""
    (rows, columns, depth), (tile_rows, tile_columns, warps) = matmul.sizes(a.shape, b.shape), tile
    c = torch.empty(rows, columns, dtype=torch.float32, device=a.codes.device)
    if 0 in (rows, columns, depth):
        return c.zero_() if bias_N is None else c.copy_(bias_N.expand_as(c))
    box = matmul.a.quantised_to.box or RUN
    sharing = box < RUN and _spare(matmul.a.quantised_to) >= 0 and _spare(matmul.b.quantised_to) >= 0
    a_axis, b_axis = matmul.contracted()
    left, right = _expanded(a, matmul.a, a_axis, sharing), _expanded(b, matmul.b, b_axis, sharing)
    with torch.cuda.device_of(c):
        kernels.multiply[(-(-rows // tile_rows) * -(-columns // tile_columns),)](
            *left, *right, bias_N, c, rows, columns, left.codes.shape[0], right.codes.shape[0], left.codes.shape[1],
            BOX=box, RUN=RUN, SHARING=sharing, M=tile_rows, N=tile_columns, GROUP=8,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
    return c


def _expanded(x: Codes, operand: Operand, axis: int, sharing: bool) -> _Vectors:
    """``x``, which is summed over along ``axis``; ``sharing``: bring runs to one step where they fit one."""
    fmt, across = operand.quantised_to, axis == 0
    layout, box = Layout.of(x.shape, operand.axis), fmt.box or RUN
    vectors, depth, boxes = x.shape[1 - axis], x.shape[axis], -(-x.shape[axis] // box)
    out_vectors, out_depth = -(-vectors // VECTORS) * VECTORS, -(-depth // RUN) * RUN
    strides = (0, 0) if fmt.box == 0 else (1, vectors) if across else (boxes, 1)
    empty: Callable[..., Tensor] = partial(torch.empty, device=x.codes.device)
    out = _Vectors(
        empty(out_vectors, out_depth, dtype=torch.int8),
        empty(out_depth // box, out_vectors, dtype=torch.float32),
        torch.zeros(out_vectors, dtype=torch.int32, device=x.codes.device) if sharing else None,
    )
    row_bits = 8 * layout.code_shape(fmt.bits)[1]
    codes, scales = x.codes.contiguous(), x.scales.contiguous()
    word = word_of(fmt.bits, row_bits, codes.data_ptr() % 4)
    with torch.cuda.device_of(codes):
        kernels.expand[(out_vectors // EXPAND[across]["V"] * (out_depth // RUN),)](
            codes, scales, *out, vectors, depth, boxes, scales.numel() - 1, row_bits // word, *strides, out_vectors,
            out_depth, **grid_of(fmt), BOX=box, SPARE=_spare(fmt) if sharing else -1, ACROSS=across, WORD=word, RUN=RUN,
            **EXPAND[across],
        )  # fmt: skip
    return out


def _spare(fmt: Format) -> int:
    """How far every code may be shifted, and its sign turned, within a byte; -1: where steps are no powers of two, or
    not at all."""
    if not GRIDS[type(fmt)].exponent_mask:
        return -1
    return (127 // -fmt.smallest_code).bit_length() - 1


_BF16 = torch.bfloat16
GEMMS = (
    GemmKernel("bfloat16", _exact(_narrow, _narrow, DTYPES), matmul_bf16, a_dtype=_BF16, b_dtype=_BF16),
    GemmKernel("split", _exact(_two_parts, _narrow, DTYPES[:1]), _in_parts, b_dtype=_BF16),
    *(GemmKernel(f"int8 {tile[0]}x{tile[1]}", _fits_int8, partial(_run, tile), packed=True) for tile in TILES),
    TORCH,
)
