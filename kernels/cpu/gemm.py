"""GEMMs of quantised operands on units that hold their products exactly, with sums in float32.

``gemm_bf16`` takes operands that bfloat16 holds exactly: the units are AVX512_BF16 on a CPU, the tensor cores on a GPU.
``gemm_boxes`` takes packed block floating point with boxes along the contraction: an exact integer dot product a box,
then the steps, as hardware for the format computes it (AVX512_VNNI). Where both factors have at most 8 bits they
multiply as bytes, at two thirds of the cost; and where a byte has room to shift narrower codes to one exponent, one dot
product takes 64 or 512 steps. Times the steps of either factor, or both, the sums of 256 products of codes, shifted or
not, have to be within float32's range.
Shape suffixes: M rows, N columns, K the contraction.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import native
from .grid import Layout
from .native_layer import scratch, summed_as_integers
from .ops import check_codes, define
from .product import Codes, Product

#: steps of the contraction, as words, in a line of native/gemm_boxes.cpp; a box has to divide it
_LINE_STEPS = 256


@cache
def has_gemm_bf16(device_type: str) -> bool:
    """Whether ``device_type`` has bfloat16 units that sum in float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and native.has("dsq_has_gemm_bf16")


def has_gemm_boxes(device_type: str, product: Product) -> bool:
    """Whether ``gemm_boxes`` can do ``product``: the units are there, both factors have the same boxes, which run along
    the contraction (or one exponent each) and divide its panels, and the sum over a box fits 32 bits."""
    a, b = product.a.grid, product.b.grid
    if device_type != "cpu" or not native.has("dsq_has_gemm_boxes") or a is None or b is None or a.box != b.box:
        return False
    dims = product.a.dim % 2, product.b.dim % 2
    box = summed_as_integers(a.box)
    fits = box % 2 == 0 and _LINE_STEPS % box == 0 and a.max_code * b.max_code * box < 1 << 31
    return fits and (a.box == 0 or dims == product.contracted())


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


def gemm_boxes(product: Product, a: Codes, b: Codes, bias_N: Tensor | None = None) -> Tensor:
    """``a b + bias`` in float32 from packed factors.

    Raises:
        ValueError: a product that has_gemm_boxes says no to; codes, exponents or a bias of other types or shapes.
    """
    if product.a.grid is None or not has_gemm_boxes("cpu", product):
        raise ValueError(f"no unit of this machine multiplies {product.a} by {product.b} in boxes")
    box = summed_as_integers(product.a.grid.box)
    a_axis, b_axis = product.contracted()
    if len({x.device for x in (*a[:2], *b[:2], bias_N) if x is not None} | {torch.device("cpu")}) > 1:
        raise ValueError("a, b and bias must be on the CPU")
    if a.shape[a_axis] != b.shape[b_axis]:
        raise ValueError(f"a and b must share the axis summed over, got {tuple(a.shape)} and {tuple(b.shape)}")
    operands: list[Tensor | int] = []
    for x, factor, axis in ((a, product.a, a_axis), (b, product.b, b_axis)):
        assert factor.grid is not None
        check_codes(x.codes, x.exponents, factor.grid, Layout.of(x.shape, factor.dim))
        operands += [x.codes, x.exponents, factor.grid.bits, int(axis == 0)]
    columns = b.shape[1 - b_axis]
    if bias_N is not None and (bias_N.shape != (columns,) or bias_N.dtype != torch.float32):
        raise ValueError(f"bias must be float32 ({columns},), got {_told(bias_N)}")
    return torch.ops.dsq.gemm_boxes(*operands, box, bias_N, a.shape[1 - a_axis], columns, a.shape[a_axis])


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _native_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride())
    library = native.library()
    return _written(sizes, bias, library.dsq_gemm_bf16, operands, library.dsq_gemm_bf16_scratch(*sizes))


def _native_boxes(
    a_codes: Tensor,
    a_exponents: Tensor,
    a_bits: int,
    a_across: int,
    b_codes: Tensor,
    b_exponents: Tensor,
    b_bits: int,
    b_across: int,
    box: int,
    bias: Tensor | None,
    rows: int,
    columns: int,
    depth: int,
) -> Tensor:
    sizes = (rows, columns, depth)
    a_codes, a_exponents, b_codes, b_exponents = (x.contiguous() for x in (a_codes, a_exponents, b_codes, b_exponents))
    a_operand = (a_codes.data_ptr(), a_exponents.data_ptr(), a_bits, a_across)
    b_operand = (b_codes.data_ptr(), b_exponents.data_ptr(), b_bits, b_across)
    one_exponent = a_exponents.dim() == 1
    library = native.library()
    room = library.dsq_gemm_boxes_scratch(*sizes, box)
    return _written(sizes, bias, library.dsq_gemm_boxes, (*a_operand, *b_operand, one_exponent, box), room)


def _written(
    sizes: tuple[int, int, int], bias: Tensor | None, gemm: Callable[..., None], operands: tuple[int, ...], room: int
) -> Tensor:
    """What ``gemm`` makes of ``operands`` with ``room`` bytes of scratch memory; it takes none that are empty."""
    rows, columns, _ = sizes
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if 0 in sizes:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    bias = bias if bias is None else bias.contiguous()
    bias_at = None if bias is None else bias.data_ptr()
    panels = scratch(room)
    gemm(*operands, bias_at, out.data_ptr(), *sizes, panels.data_ptr(), torch.get_num_threads())
    return out


def _fake_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _fake_boxes(a_codes: Tensor, *rest) -> Tensor:
    rows, columns, _ = rest[-3:]
    return a_codes.new_empty(rows, columns, dtype=torch.float32)


define("gemm_bf16(Tensor a, Tensor b, Tensor? bias) -> Tensor", _native_bf16, _fake_bf16)
define(
    "gemm_boxes(Tensor a_codes, Tensor a_exponents, int a_bits, int a_across, Tensor b_codes, Tensor b_exponents, "
    "int b_bits, int b_across, int box, Tensor? bias, SymInt rows, SymInt columns, SymInt depth) -> Tensor",
    _native_boxes,
    _fake_boxes,
)
