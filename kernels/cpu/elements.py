"""Products of grids' elements by the integer GEMM (products.py), where these are integers of at most 8 bits in units of
the finest step: MXFP4, NVFP4, MXFP6 of E2M3, MX6, MX4, int8 with a scale for a row or the tensor.

Elements are multiplied as integers, with the scales of blocks, and the sums by what is left of the scales. The values
of an operand are not rounded to float32 before.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, GridFormat, Layout, SignedNVInt
from dsq.kernels.backend import Codes, GemmKernel, MatMul, Operand, along_contraction
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.products import fits_integer, multiply_packed, wants_exact


def elements_gemm(codec: CodecKernels) -> GemmKernel:
    """Return the kernel "elements"; ``codec`` makes integers of elements."""
    fits = _fits if codec.library.has_gemm("GEMM_INTEGER") else lambda *product: False
    return GemmKernel("elements", fits, _multiply, packed=True, convert=partial(_as_integers, codec))


def _fits(matmul: MatMul, dtype: torch.dtype) -> bool:
    """Whether an operand is of a grid, and "integer" multiplies the elements of both."""
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
    bits, (rows, columns) = _integer_bits(fmt), fmt.block
    if bits > 8:
        return None
    if fmt.scale != "fp32":
        return (SignedNVInt if fmt.scale == "e4m3" else BFP)(bits, columns) if columns else None
    by_vector = rows == 1 and operand.axis % 2 == contracted
    return FixedPoint(bits) if columns == 0 and (rows == 0 or by_vector) else None


def _integer_bits(fmt: GridFormat) -> int:
    return fmt.grid.integer_bits + (fmt.pair > 0)  # a pair may have half the step


class _Integers(NamedTuple):
    """Elements as integers with the scales of their blocks, and the factors that make their values of these."""

    codes: Codes
    power: float = 1.0
    scales: Tensor | None = None  #: float32, one, or one of each vector


def _multiply(matmul: MatMul, a: _Integers, b: _Integers, bias_N: Tensor | None) -> Tensor:
    """Return ``a b + bias`` in float32 of elements as integers."""
    of_integers = _of_integers(matmul)
    assert of_integers is not None
    y = multiply_packed(of_integers, a.codes, b.codes, None)
    power = a.power * b.power
    if power != 1:
        y.mul_(power)
    for scales in (None if a.scales is None else a.scales.view(-1, 1), b.scales):
        if scales is not None:  # not by the product of both, which may be below float32's range
            y.mul_(scales)
    return y if bias_N is None else y.add_(bias_N)


def _as_integers(codec: CodecKernels, operand: Operand, x: Codes) -> _Integers:
    """Return packed elements as integers."""
    fmt = operand.quantized_to
    if not isinstance(fmt, GridFormat):
        return _Integers(x)
    layout, bits, unit = Layout.of(x.shape, operand.axis), _integer_bits(fmt), fmt.grid.unit - (fmt.pair > 0)
    _, tall, long = fmt.blocks(layout)
    scales, rest = x.scales[: tall * long], x.scales[tall * long :]
    elements = fmt if fmt.pair else GridFormat(fmt.grid, (0, 0))  # where scales are 1 these are the values
    ones = torch.full((tall * long if fmt.pair else 1,), BIAS, dtype=torch.uint8, device="cpu")
    ones = torch.cat([ones, rest]) if fmt.pair else ones
    values = codec.unpack(x.codes.contiguous(), ones, elements, layout, torch.bfloat16).view(x.shape)
    codes, one_scale = codec.pack(values, FixedPoint(bits, -unit), layout, None)
    if fmt.scale == "fp32":
        of_vectors = x.scales.clone().view(torch.float32)  # none if there are no values
        return _Integers(Codes(codes, one_scale, x.shape), 1.0, of_vectors if of_vectors.numel() else None)
    of_vectors = scales.view(tall, long).repeat_interleave(fmt.tile(layout)[0], 0)
    of_vectors = of_vectors[: x.shape[1 if layout.along_rows else 0]]
    scales = (of_vectors.t() if layout.along_rows else of_vectors).flatten()
    if fmt.scale == "e4m3":
        of_tensor = scales.new_tensor([BIAS + bits + 6 + unit])  # the exponent with which a scale of 1 is a unit's step
        return _Integers(Codes(codes, torch.cat([scales, of_tensor]), x.shape), 1.0, rest.clone().view(torch.float32))
    return _Integers(Codes(codes, scales, x.shape), 2.0 ** (unit + bits - 2) / fmt.prescale)
