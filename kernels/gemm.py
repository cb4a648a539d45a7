"""GEMMs of quantised operands on units that hold their products exactly, with sums in float32.

``gemm_bf16`` takes operands that bfloat16 holds exactly: the units are AVX512_BF16 on a CPU, the tensor cores on a GPU.
``gemm_boxes`` takes packed block floating point with boxes along the contraction: an exact integer dot product a box,
then the steps, as hardware for the format computes it (AVX512_VNNI). One operand may be 16 bits wide there.
Shape suffixes: M rows, N columns, K the contraction.
"""

import math
from functools import cache

import torch
from torch import Tensor

from . import native
from .grid import Grid, Layout
from .native_product import scratch, summed_as_integers
from .ops import check_codes, define

#: steps of the contraction in a panel of native/panels.h; a box has to divide it
_DEPTH = 256


@cache
def has_gemm_bf16(device_type: str) -> bool:
    """Whether ``device_type`` has bfloat16 units that sum in float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and native.has("dsq_has_gemm_bf16")


def has_gemm_boxes(device_type: str, a: Grid | None, b: Grid | None) -> bool:
    """Whether ``gemm_boxes`` can multiply ``a`` by ``b``: the units are there and a box's sum fits 32 bits."""
    if device_type != "cpu" or not native.has("dsq_has_gemm_boxes") or a is None or b is None or a.box != b.box:
        return False
    box = summed_as_integers(a.box)
    return box % 2 == 0 and _DEPTH % box == 0 and a.max_code * b.max_code * box < 1 << 31


def gemm_bf16(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``a b + bias`` in float32 from bfloat16 operands and a float32 bias.

    Raises:
        ValueError: other types, or shapes or devices that do not fit.
    """
    fits = a_MK.dim() == b_KN.dim() == 2 and a_MK.shape[1] == b_KN.shape[0]
    if not fits or a_MK.dtype != torch.bfloat16 or b_KN.dtype != torch.bfloat16:
        raise ValueError(f"a (M, K) and b (K, N) must be bfloat16, got {_told(a_MK)} and {_told(b_KN)}")
    if bias_N is not None and (bias_N.shape != b_KN.shape[1:] or bias_N.dtype != torch.float32):
        raise ValueError(f"bias must be float32 ({b_KN.shape[1]},), got {_told(bias_N)}")
    if len({x.device for x in (a_MK, b_KN, bias_N) if x is not None}) > 1:
        raise ValueError("a, b and bias must be on one device")
    if a_MK.device.type == "cuda":
        product = torch.mm(a_MK, b_KN, out_dtype=torch.float32)
        return product if bias_N is None else product.add_(bias_N)
    return torch.ops.dsq.gemm_bf16(a_MK, b_KN, bias_N)


def gemm_boxes(
    a: tuple[Tensor, Tensor], a_grid: Grid, b: tuple[Tensor, Tensor], b_grid: Grid, rows: int, columns: int, depth: int
) -> Tensor:
    """``a^T b`` in float32 from codes and exponents of a (depth, rows) and a (depth, columns) tensor, boxes along 0.

    Raises:
        ValueError: codes or exponents of other types or shapes; grids that has_gemm_boxes says no to.
    """
    if not has_gemm_boxes("cpu", a_grid, b_grid):
        raise ValueError(f"no unit of this machine multiplies {a_grid} by {b_grid} in boxes")
    check_codes(*a, a_grid, Layout.of((depth, rows), 0))
    check_codes(*b, b_grid, Layout.of((depth, columns), 0))
    return torch.ops.dsq.gemm_boxes(
        *a, a_grid.bits, *b, b_grid.bits, summed_as_integers(a_grid.box), rows, columns, depth
    )


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _native_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if math.prod((rows, columns, depth)) == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    library = native.library()
    panels = scratch(library.dsq_gemm_bf16_scratch(rows, columns, depth))
    bias = bias if bias is None else bias.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), bias_at)
    library.dsq_gemm_bf16(*operands, out.data_ptr(), rows, columns, depth, panels.data_ptr(), torch.get_num_threads())
    return out


def _native_boxes(
    a_codes: Tensor,
    a_exponents: Tensor,
    a_bits: int,
    b_codes: Tensor,
    b_exponents: Tensor,
    b_bits: int,
    box: int,
    rows: int,
    columns: int,
    depth: int,
) -> Tensor:
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if math.prod((rows, columns, depth)) == 0:
        return out.zero_()
    a_codes, a_exponents, b_codes, b_exponents = (x.contiguous() for x in (a_codes, a_exponents, b_codes, b_exponents))
    library = native.library()
    panels = scratch(library.dsq_gemm_boxes_scratch(rows, columns, depth, box))
    one_exponent = a_exponents.dim() == 1
    a_operand = (a_codes.data_ptr(), a_exponents.data_ptr(), a_bits)
    b_operand = (b_codes.data_ptr(), b_exponents.data_ptr(), b_bits)
    sizes = (rows, columns, depth, panels.data_ptr(), torch.get_num_threads())
    library.dsq_gemm_boxes(*a_operand, *b_operand, one_exponent, box, out.data_ptr(), *sizes)
    return out


def _fake_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _fake_boxes(a_codes: Tensor, *rest) -> Tensor:
    rows, columns, _ = rest[-3:]
    return a_codes.new_empty(rows, columns, dtype=torch.float32)


define("gemm_bf16(Tensor a, Tensor b, Tensor? bias) -> Tensor", _native_bf16, _fake_bf16)
define(
    "gemm_boxes(Tensor a_codes, Tensor a_exponents, int a_bits, Tensor b_codes, Tensor b_exponents, int b_bits, "
    "int box, SymInt rows, SymInt columns, SymInt depth) -> Tensor",
    _native_boxes,
    _fake_boxes,
)
