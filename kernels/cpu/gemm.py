"""Products of quantised operands by the compiled kernels (src/gemm): products of values exact, sums in float32.

bfloat16 takes operands that bfloat16 holds exactly (AVX512_BF16): of bfloat16 tensors BFP of any width. integer takes
packed operands with boxes along the contraction: an exact integer dot product a box, then the boxes' scale factors, as
hardware for the format computes it (AVX512_VNNI). Where both have at most 8 bits they multiply as bytes, at two thirds
of the cost; and where a byte has room to shift narrower codes to one exponent, one dot product takes 64 or 512 values
of the contraction. The sums of 256 products of codes, shifted or not, times the scale factors of either operand or
both, have to be within float32's range.

Shape suffixes: M rows, N columns, K the contraction.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout
from dsq.formats.base import MAX_PACKED_BITS
from dsq.kernels.backend import Codes, Gemm, MatMul, Operand, check_codes
from dsq.kernels.cpu.codec import FORMATS, SCALES
from dsq.kernels.cpu.library import Library, library
from dsq.kernels.cpu.scratch import scratch
from dsq.kernels.operators import define
from dsq.kernels.reference.gemm import TORCH

#: values of a vector in a panel of int16 (src/gemm/integer_packing.h); a box has to divide it
_PANEL_DEPTH = 256
#: the name of PyTorch's other float32 product
ONEDNN = "onednn"


def gemms(library: Library) -> tuple[Gemm, ...]:
    """The kernels of ``library``, and for what they do not take PyTorch's matmul and the one of its oneDNN: on CPUs of
    other makers PyTorch's, by Intel's MKL, may leave the widest units idle; a small product it starts sooner."""
    has_bfloat16, has_integer = library.has_gemm("GEMM_BFLOAT16"), library.has_gemm("GEMM_INTEGER")
    bf16 = torch.bfloat16
    return (
        Gemm("bfloat16", lambda *product: has_bfloat16 and _fits_bfloat16(*product), _bfloat16, False, bf16, bf16),
        Gemm("integer", lambda *product: has_integer and _fits_integer(*product), _integer, packed=True),
        TORCH,
        Gemm(ONEDNN, _fits_onednn, _by_onednn),
    )


def summed_as_integers(box: int) -> int:
    """Values of one integer dot product: a box, or some number where one scale serves the tensor (0)."""
    return box or 16


def _fits_bfloat16(matmul: MatMul, dtype: torch.dtype) -> bool:
    a, b = matmul.a.format, matmul.b.format
    if not _exact(matmul, dtype) or a is None or b is None:
        return False
    kept = dtype is torch.bfloat16 and isinstance(a, BFP) and a.packs  # on whose grid a bfloat16 value stays one
    return (a.exact_in_bfloat16 or kept) and b.exact_in_bfloat16


def _fits_integer(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Both operands have the same boxes, which run along the contraction (or one scale each) and divide a panel, and a
    box's sum fits 32 bits."""
    a, b = matmul.a.format, matmul.b.format
    if not _exact(matmul, dtype) or a is None or b is None or not {type(a), type(b)} <= FORMATS:
        return False
    box = summed_as_integers(a.box)
    divides = box % 2 == 0 and _PANEL_DEPTH % box == 0
    fits = a.packs and b.packs and a.smallest_code * b.smallest_code * box < 1 << 31
    return divides and fits and matmul.boxes_match()


def _fits_onednn(matmul: MatMul, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and torch.backends.mkldnn.is_available()


def _by_onednn(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    return by_onednn(a_MK.contiguous(), b_KN.t().contiguous(), bias_N)


def by_onednn(a: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """``a b^T + bias`` of contiguous a (M, K), in float32."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b_NK, bias_N, "none", [], "")
    return y


def _exact(matmul: MatMul, dtype: torch.dtype) -> bool:
    return matmul.exact and dtype is not torch.float64


def _bfloat16(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` in float32. Raises ValueError for other dtypes than bfloat16, and float32 for the bias, and for
    shapes or devices that do not fit."""
    _check_bf16(a_MK, b_KN, bias_N)
    result: Tensor = torch.ops.dsq.gemm_bf16(a_MK, b_KN, bias_N)
    return result


def _integer(matmul: MatMul, a: Codes, b: Codes, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` in float32. Raises ValueError for a product that does not fit the kernel, and for codes, scales or
    a bias of other dtypes or shapes."""
    if not _fits_integer(matmul, torch.float32) or matmul.a.format is None:
        raise ValueError(f"the integer kernel does not multiply {matmul.a} by {matmul.b}")
    a_axis, b_axis = matmul.contracted()
    _check_devices(a.codes, a.scales, b.codes, b.scales, bias_N)
    if a.shape[a_axis] != b.shape[b_axis]:
        raise ValueError(f"a and b must share the axis summed over, got {tuple(a.shape)} and {tuple(b.shape)}")
    columns = b.shape[1 - b_axis]
    _check_bias(bias_N, columns)
    operands = (*_packed(a, matmul.a, a_axis), *_packed(b, matmul.b, b_axis))
    box = summed_as_integers(matmul.a.format.box)
    sizes = a.shape[1 - a_axis], columns, a.shape[a_axis]
    result: Tensor = torch.ops.dsq.gemm_integer(*operands, box, bias_N, *sizes)
    return result


def _packed(x: Codes, operand: Operand, axis: int) -> tuple[Tensor, Tensor, int, int, int]:
    """Codes, scales, what these are, bits, and whether a row of codes holds one index of the contraction."""
    assert operand.format is not None
    check_codes(x.codes, x.scales, operand.format, Layout.of(x.shape, operand.axis))
    kind = getattr(library().c, SCALES[type(operand.format)])
    return x.codes, x.scales, kind, operand.format.bits, int(axis == 0)


def _check_bias(bias_N: Tensor | None, columns: int) -> None:
    if bias_N is not None and (bias_N.shape != (columns,) or bias_N.dtype != torch.float32):
        raise ValueError(f"bias must be float32 ({columns},), got {_told(bias_N)}")


def _check_devices(*tensors: Tensor | None) -> None:
    if any(x.device.type != "cpu" for x in tensors if x is not None):
        raise ValueError("a, b and bias must be on the CPU")


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _check_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    if not fits or a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise ValueError(f"a (M, K) and b (K, N) must be bfloat16, got {_told(a)} and {_told(b)}")
    _check_bias(bias, b.shape[1])
    _check_devices(a, b, bias)
    if not library().has_gemm("GEMM_BFLOAT16"):
        raise ValueError("this CPU has no bfloat16 products (AVX512_BF16)")


def _check_integer(box: int, bias: Tensor | None, rows: int, columns: int, depth: int) -> None:
    if min(rows, columns, depth) < 0:
        raise ValueError(f"rows, columns and depth must be at least 0, got {rows}, {columns} and {depth}")
    if box < 2 or box % 2 or _PANEL_DEPTH % box:
        raise ValueError(f"box must be even and divide {_PANEL_DEPTH}, got {box}")
    _check_bias(bias, columns)
    _check_devices(bias)
    if not library().has_gemm("GEMM_INTEGER"):
        raise ValueError("this CPU has no integer products (AVX512_VNNI)")


def _check_packed(
    codes: Tensor, scales: Tensor, kind: int, bits: int, across: int, box: int, length: int, depth: int
) -> bool:
    """Whether one scale serves all of the codes of ``length`` vectors of ``depth`` values, else in boxes along those.
    ValueError where they are not such codes."""
    formats: dict[int, Callable[..., Format]] = {
        getattr(library().c, name): fmt for fmt, name in SCALES.items() if fmt is not FixedPoint
    }
    if kind not in formats:
        raise ValueError(f"what the scales are must be one of {sorted(formats)}, got {kind}")
    if not 2 <= bits <= MAX_PACKED_BITS or across not in (0, 1):
        raise ValueError(f"bits must be 2 to {MAX_PACKED_BITS} and across 0 or 1, got {bits} and {across}")
    layout = Layout.of((depth, length) if across else (length, depth), 0 if across else 1)
    one_scale = formats[kind] is BFP and scales.dim() == 1
    check_codes(codes, scales, FixedPoint(bits) if one_scale else formats[kind](bits, box=box), layout)
    _check_devices(codes)
    return one_scale


def _run_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    _check_bf16(a, b, bias)
    sizes, c = (a.shape[0], b.shape[1], a.shape[1]), library().c
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride())
    return _written(sizes, bias, c.dsq_gemm_bfloat16, operands, c.dsq_gemm_bfloat16_scratch(*sizes))


def _run_integer(
    a_codes: Tensor,
    a_scales: Tensor,
    a_kind: int,
    a_bits: int,
    a_across: int,
    b_codes: Tensor,
    b_scales: Tensor,
    b_kind: int,
    b_bits: int,
    b_across: int,
    box: int,
    bias: Tensor | None,
    rows: int,
    columns: int,
    depth: int,
) -> Tensor:
    _check_integer(box, bias, rows, columns, depth)
    one_scale = _check_packed(a_codes, a_scales, a_kind, a_bits, a_across, box, rows, depth)
    if one_scale != _check_packed(b_codes, b_scales, b_kind, b_bits, b_across, box, columns, depth):
        raise ValueError("a and b must both have one scale, or both a scale a box")
    sizes, c = (rows, columns, depth), library().c
    a_codes, a_scales, b_codes, b_scales = (x.contiguous() for x in (a_codes, a_scales, b_codes, b_scales))
    a_operand = (a_codes.data_ptr(), a_scales.data_ptr(), a_kind, a_bits, a_across)
    b_operand = (b_codes.data_ptr(), b_scales.data_ptr(), b_kind, b_bits, b_across)
    room = c.dsq_gemm_integer_scratch(*sizes, box)
    return _written(sizes, bias, c.dsq_gemm_integer, (*a_operand, *b_operand, one_scale, box), room)


def _written(
    sizes: tuple[int, int, int], bias: Tensor | None, gemm: Callable[..., None], operands: tuple[int, ...], room: int
) -> Tensor:
    """What ``gemm`` computes of ``operands`` with ``room`` bytes of scratch memory; it takes none that are empty."""
    rows, columns, _ = sizes
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if 0 in sizes:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    bias = bias if bias is None else bias.contiguous()
    bias_address = 0 if bias is None else bias.data_ptr()
    panels = scratch(room)
    gemm(*operands, bias_address, out.data_ptr(), *sizes, panels.data_ptr(), torch.get_num_threads())
    return out


def _fake_bf16(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _fake_integer(a_codes: Tensor, *rest: Any) -> Tensor:
    rows, columns, _ = rest[-3:]
    return a_codes.new_empty(rows, columns, dtype=torch.float32)


define("gemm_bf16(Tensor a, Tensor b, Tensor? bias) -> Tensor", _run_bf16, _fake_bf16)
define(
    "gemm_integer(Tensor a_codes, Tensor a_scales, int a_kind, int a_bits, int a_across, Tensor b_codes, "
    "Tensor b_scales, int b_kind, int b_bits, int b_across, int box, Tensor? bias, SymInt rows, SymInt columns, "
    "SymInt depth) -> Tensor",
    _run_integer,
    _fake_integer,
)
