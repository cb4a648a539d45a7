"""A product of two matrices: quantise, multiply, quantise. The backend says how it can multiply."""

import torch
from torch import Tensor

from dsq.formats import Format
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.dispatch import backend_for, gemm_for, pack, plain, quantize, unpack


def multiply(
    matmul: MatMul, a: Tensor, b: Tensor | Codes, bias_N: Tensor | None = None, seed: int | None = None
) -> Tensor:
    """``a b`` (+ bias), with what ``matmul`` says of both and of the result; in the dtype of ``a``.

    ``seed`` None rounds to nearest; a number rounds stochastically, each tensor with random numbers of its own.
    """
    sizes = matmul.sizes(a.shape, b.shape) if plain(a) else None  # a compiler's sizes are symbols
    gemm = gemm_for(matmul, a.dtype, sizes, backend_for(a.device))
    if gemm.packed:
        result = gemm.run(matmul, packed(matmul.a, a, seed), packed(matmul.b, b, seed), bias_N)
    else:
        left = _values(matmul.a, a, gemm.a_dtype or a.dtype, seed)
        right = _values(matmul.b, b, gemm.b_dtype or a.dtype, seed)
        result = gemm.run(matmul, left, right, bias_N)
    if matmul.result is None:
        return result
    return quantize(result, matmul.result, -1, _plus(seed, matmul.result_seed))


def packed(operand: Operand, x: Tensor | Codes, seed: int | None) -> Codes:
    """``x`` in the bits of ``operand``, which has a format."""
    if isinstance(x, Codes):
        return x
    return Codes(*pack(x, _format(operand), operand.axis, _plus(seed, operand.seed)), x.shape)


def _values(operand: Operand, x: Tensor | Codes, dtype: torch.dtype, seed: int | None) -> Tensor:
    """The operand as it is multiplied."""
    if isinstance(x, Codes):
        values = unpack(x.codes, x.scales, _format(operand), x.shape, operand.axis, dtype)
    elif operand.format is None:
        values = x
    else:
        values = quantize(x, operand.format, operand.axis, _plus(seed, operand.seed), dtype)
    return values.t() if operand.transposed else values


def _format(operand: Operand) -> Format:
    assert operand.format is not None
    return operand.format


def _plus(seed: int | None, offset: int) -> int | None:
    return None if seed is None else seed + offset
