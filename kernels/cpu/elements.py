"""Products of grids' elements, which are multiplied without their scales, and the sums by these. The values of an
operand are not rounded to float32 before. The GEMMs are those of products.py:

    elements            the integer one, with the scales of blocks, where elements are integers of at most 8 bits in
                        units of the finest step: MXFP4, NVFP4, MXFP6 of E2M3, MX6, MX4, int8 by row or tensor
    bfloat16 elements   FP8 with a float32 scale for a row or the tensor
"""

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, GridFormat, Layout, SignedNVInt
from dsq.kernels.backend import Codes, GemmKernel, MatMul, Operand, along_contraction
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.products import INTEGERS, ElementCodes, bfloat16_gemm, fits_integer, multiply_packed, wants_exact


def elements_gemm(codec: CodecKernels) -> GemmKernel:
    """Return the kernel "elements"."""
    fits = codec.library.fits_with("GEMM_INTEGER", _fits_integers)
    return GemmKernel("elements", fits, _multiply_integers, packed=True, convert=partial(_as_integers, codec))


def bfloat16_elements_gemm(codec: CodecKernels) -> GemmKernel:
    """Return the kernel "bfloat16 elements"."""
    fits = codec.library.fits_with("GEMM_BFLOAT16", _fits_bfloat16_elements)
    run = partial(_multiply_bfloat16_elements, bfloat16_gemm(codec.library, "bfloat16"))
    return GemmKernel("bfloat16 elements", fits, run, packed=True, convert=partial(_as_bfloat16, codec))


class _Elements(NamedTuple):
    """Elements as a GEMM takes them, and the factors that make an operand's values of these."""

    elements: Any
    power: float = 1.0
    scales: Tensor | None = None  #: float32, one, or one of each vector
    codes: ElementCodes = INTEGERS  #: what they are in memory


def _scaled(y: Tensor, a: _Elements, b: _Elements, bias_N: Tensor | None) -> Tensor:
    """Return a product of elements with its factors and the bias, in the memory of ``y``."""
    power = a.power * b.power
    if power != 1:
        y.mul_(power)
    for scales in (None if a.scales is None else a.scales.view(-1, 1), b.scales):
        if scales is not None:  # not by the product of both, which may be below float32's range
            y.mul_(scales)
    return y if bias_N is None else y.add_(bias_N)


def _float32_scales(x: Codes) -> Tensor | None:
    """Return the scales of packed rows, or of a tensor; None if there are no values."""
    return x.scales.clone().view(torch.float32) if x.scales.numel() else None


def _has_float32_scales(operand: Operand, contracted: int) -> bool:
    """Return whether an operand has a float32 scale for the tensor, or for each vector."""
    fmt = operand.format
    if not isinstance(fmt, GridFormat) or fmt.scale != "fp32" or fmt.prescale != 1:
        return False
    return fmt.block == (0, 0) or (fmt.block == (1, 0) and operand.axis % 2 == contracted)


# ---- elements that bfloat16 holds


def _fits_bfloat16_elements(matmul: MatMul, dtype: torch.dtype) -> bool:
    operands = zip((matmul.a, matmul.b), matmul.contracted(), strict=True)
    scaled = all(_has_float32_scales(*operand) for operand in operands)
    exact = all(isinstance(x.format, GridFormat) and x.format.grid.significand_bits <= 8 for x in (matmul.a, matmul.b))
    return scaled and exact and wants_exact(matmul, dtype)


def _multiply_bfloat16_elements(
    gemm: GemmKernel, matmul: MatMul, a: _Elements, b: _Elements, bias_N: Tensor | None
) -> Tensor:
    return _scaled(gemm.run(matmul, a.elements, b.elements, None), a, b, bias_N)


def _as_bfloat16(codec: CodecKernels, operand: Operand, x: Codes) -> _Elements:
    values = _values_at_scale_1(codec, operand, x)
    return _Elements(values.mT if operand.transposed else values, 1.0, _float32_scales(x))


def _values_at_scale_1(codec: CodecKernels, operand: Operand, x: Codes) -> Tensor:
    """Return packed elements in bfloat16."""
    fmt = operand.quantized_to
    assert isinstance(fmt, GridFormat)
    layout, scales = Layout.of(x.shape, operand.axis), torch.full((1,), BIAS, dtype=torch.uint8, device="cpu")
    if fmt.pair:  # whose bits follow the scales
        blocks = prod(fmt.blocks(layout))
        scales = torch.cat([scales.expand(blocks), x.scales[blocks:]])
    elements = fmt if fmt.pair else GridFormat(fmt.grid, (0, 0))
    return codec.unpack(x.codes.contiguous(), scales, elements, layout, torch.bfloat16).view(x.shape)


# ---- elements that are integers


def _fits_integers(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Return whether an operand is of a grid, and "integer" multiplies the elements of both."""
    of_integers = _of_integers(matmul)
    return of_integers is not None and wants_exact(matmul, dtype) and fits_integer(of_integers, dtype)


@lru_cache(maxsize=256)
def _of_integers(matmul: MatMul) -> MatMul | None:
    """Return the product of elements as integers, with scales of blocks, if they have any; None if there is none."""
    a, b = (_integers(*operand) for operand in zip((matmul.a, matmul.b), matmul.contracted(), strict=True))
    grids = isinstance(matmul.a.format, GridFormat) or isinstance(matmul.b.format, GridFormat)
    if a is None or b is None or not grids or not matmul.blocks_match():
        return None
    return along_contraction(a, b, (matmul.a.transposed, matmul.b.transposed))


def _integers(operand: Operand, contracted: int) -> Format | None:
    fmt = operand.format
    if not isinstance(fmt, GridFormat):
        return fmt
    bits = _integer_bits(fmt)
    if bits > 8:
        return None
    if fmt.scale == "fp32":
        return FixedPoint(bits) if _has_float32_scales(operand, contracted) else None
    return (SignedNVInt if fmt.scale == "e4m3" else BFP)(bits, fmt.block_size) if fmt.block_size else None


def _integer_bits(fmt: GridFormat) -> int:
    return fmt.grid.integer_bits + (fmt.pair > 0)  # a pair may have half the step


def _multiply_integers(matmul: MatMul, a: _Elements, b: _Elements, bias_N: Tensor | None) -> Tensor:
    of_integers = _of_integers(matmul)
    assert of_integers is not None
    y = multiply_packed(of_integers, a.elements, b.elements, None, a.codes, b.codes)
    return _scaled(y, a, b, bias_N)


def _as_integers(codec: CodecKernels, operand: Operand, x: Codes) -> _Elements:
    """Return packed elements as the GEMM reads them, with the scales of their blocks as those of another format."""
    fmt = operand.quantized_to
    if not isinstance(fmt, GridFormat):
        return _Elements(x)
    layout, bits, unit = Layout.of(x.shape, operand.axis), _integer_bits(fmt), fmt.grid.unit - (fmt.pair > 0)
    codes, of_elements = x.codes, ElementCodes(fmt.grid.digits, fmt.bits)
    if fmt.pair:  # whose elements have no codes of their own
        values = _values_at_scale_1(codec, operand, x)
        codes, of_elements = codec.pack(values, FixedPoint(bits, -unit), layout, None)[0], INTEGERS
    power = unit + bits - 2  # of two, the step of integers of `bits` bits at a scale of 1
    if fmt.scale == "fp32":
        one = x.scales.new_tensor([BIAS + power])
        return _Elements(Codes(codes, one, x.shape), 1.0, _float32_scales(x), of_elements)
    _, *blocks = fmt.blocks(layout)
    of_vectors = x.scales[: prod(blocks)].view(blocks).repeat_interleave(fmt.tile(layout)[0], 0)
    of_vectors = of_vectors[: x.shape[1 if layout.along_rows else 0]]
    scales = (of_vectors.t() if layout.along_rows else of_vectors).flatten()
    if fmt.scale == "e8m0":
        return _Elements(Codes(codes, scales, x.shape), 2.0**power / fmt.prescale, None, of_elements)
    of_tensor = scales.new_tensor([BIAS + bits + 6 + unit])  # the exponent with which a scale of 1 is a unit's step
    scale_of_tensor = x.scales[prod(blocks) :].clone().view(torch.float32)
    return _Elements(Codes(codes, torch.cat([scales, of_tensor]), x.shape), 1.0, scale_of_tensor, of_elements)
