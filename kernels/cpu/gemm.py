"""Products of quantised operands by the compiled kernels (src/gemm): products of values exact, sums in float32.

bfloat16 takes operands that bfloat16 holds exactly (AVX512_BF16): of bfloat16 tensors BFP of any width. integer takes
packed operands with boxes along the contraction: an exact integer dot product a box, then the boxes' scale factors, as
hardware for the format computes it (AVX512_VNNI; NEON's sdot, codes of at most 8 bits; AVX2, codes of at most 13 bits
together). With AVX512_VNNI codes of at most 8 bits multiply as bytes, at two thirds of the cost; and where a byte has
room to shift narrower codes to one exponent, one dot product takes 64 or 512 values of the contraction. The sums of
256 products of codes, shifted or not, times the scale factors of either operand or both, have to be within float32's
range.

Shape suffixes: M rows, N columns, K the contraction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsq.formats import BFP, Layout
from dsq.kernels.backend import Codes, GemmKernel, MatMul, Operand, Sizes, check_codes
from dsq.kernels.cpu.codec import SCALES
from dsq.kernels.cpu.library import Library, library
from dsq.kernels.cpu.scratch import scratch
from dsq.kernels.reference.gemm import TORCH

#: values of a vector in a panel of int16 (src/gemm/integer_packing.h); a box has to divide it
_MOST_BOX = 256
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
        GemmKernel(ONEDNN, _fits_onednn, _by_onednn),
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
    """Both operands have the same boxes, which run along the contraction (or one scale each) and divide a panel, codes
    of a width that this machine multiplies, and a box's sum fits 32 bits."""
    a, b = matmul.a.format, matmul.b.format
    if not _exact(matmul, dtype) or a is None or b is None or not {type(a), type(b)} <= SCALES.keys():
        return False
    box = summed_as_integers(a.box)
    takes = _MOST_BOX % box == 0 and library().c.dsq_gemm_integer_fits(a.bits, b.bits, box)
    fits = a.packs and b.packs and a.smallest_code * b.smallest_code * box < 1 << 31
    return bool(takes) and fits and matmul.boxes_match()


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
    fits = a_MK.dim() == b_KN.dim() == 2 and a_MK.shape[1] == b_KN.shape[0]
    if not fits or a_MK.dtype != torch.bfloat16 or b_KN.dtype != torch.bfloat16:
        raise ValueError(f"a (M, K) and b (K, N) must be bfloat16, got {_told(a_MK)} and {_told(b_KN)}")
    sizes, c = (a_MK.shape[0], b_KN.shape[1], a_MK.shape[1]), library().c
    _check_bias(bias_N, sizes[1])
    _check_devices(a_MK, b_KN, bias_N)
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride())
    return _written(sizes, bias_N, c.dsq_gemm_bfloat16, operands, c.dsq_gemm_bfloat16_scratch(*sizes))


def _integer(matmul: MatMul, a: Codes, b: Codes, bias_N: Tensor | None) -> Tensor:
    """``a b + bias`` in float32. Raises ValueError for a product that does not fit the kernel, and for codes, scales or
    a bias of other dtypes or shapes."""
    if not _fits_integer(matmul, torch.float32) or matmul.a.format is None:
        raise ValueError(f"the integer kernel does not multiply {matmul.a} by {matmul.b}")
    a_axis, b_axis = matmul.contracted()
    if a.shape[a_axis] != b.shape[b_axis]:
        raise ValueError(f"a and b must share the axis summed over, got {tuple(a.shape)} and {tuple(b.shape)}")
    sizes, c = matmul.sizes(a.shape, b.shape), library().c
    _check_bias(bias_N, sizes[1])
    _check_devices(a.codes, a.scales, b.codes, b.scales, bias_N)
    a, b = (x._replace(codes=x.codes.contiguous(), scales=x.scales.contiguous()) for x in (a, b))
    one_scale, box = matmul.a.format.box == 0, summed_as_integers(matmul.a.format.box)
    operands = (*_packed(a, matmul.a, a_axis), *_packed(b, matmul.b, b_axis), one_scale, box)
    return _written(sizes, bias_N, c.dsq_gemm_integer, operands, c.dsq_gemm_integer_scratch(*sizes, box))


def _packed(x: Codes, operand: Operand, axis: int) -> tuple[int, int, int, int, int]:
    """The addresses of codes and scales, what these are, bits, and whether a row of codes holds one index of the
    contraction."""
    assert operand.format is not None
    check_codes(x.codes, x.scales, operand.format, Layout.of(x.shape, operand.axis))
    kind = getattr(library().c, SCALES[type(operand.format)])
    return x.codes.data_ptr(), x.scales.data_ptr(), kind, operand.format.bits, int(axis == 0)


def _check_bias(bias_N: Tensor | None, columns: int) -> None:
    if bias_N is not None and (bias_N.shape != (columns,) or bias_N.dtype != torch.float32):
        raise ValueError(f"bias must be float32 ({columns},), got {_told(bias_N)}")


def _check_devices(*tensors: Tensor | None) -> None:
    if any(x.device.type != "cpu" for x in tensors if x is not None):
        raise ValueError("a, b and bias must be on the CPU")


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _written(
    sizes: Sizes, bias: Tensor | None, gemm: Callable[..., None], operands: tuple[int, ...], room: int
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
