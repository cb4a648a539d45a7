"""A product of two matrices: quantise, multiply, quantise. The backend says how it can multiply.

It is a registered operator too, which is what compilers, modes, function transforms and counters of FLOPs see.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd
from torch.utils.flop_counter import register_flop_formula

from dsq.formats import Format, Layout
from dsq.kernels.backend import Codes, MatMul, Operand, check_codes, parse_matmul
from dsq.kernels.dispatch import backend_for, define, gemm_for, pack, plain, quantize, signed, unpack
from dsq.kernels.reference.backend import TORCH


def multiply(
    matmul: MatMul,
    a: Tensor,
    b: Tensor | Codes,
    bias_N: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``a b`` (+ bias), with what ``matmul`` says of both and of the result; in ``dtype`` (default: that of ``a``).

    PyTorch multiplies in the narrower of the dtypes of ``a`` and of the result. Batches of matrices broadcast, and are
    always PyTorch's to multiply; the axes in ``matmul`` then count from the end.

    ``seed`` None rounds to nearest; a number rounds stochastically, each tensor with random numbers of its own.
    """
    dtype = dtype or a.dtype
    if plain(a, bias_N):
        return _multiply(matmul, a, b, bias_N, seed, dtype)
    codes, scales, shape = b if isinstance(b, Codes) else (b, None, None)
    result: Tensor = torch.ops.dsq.multiply(a, codes, scales, shape, bias_N, matmul.text, signed(seed), dtype)
    return result


def _multiply(
    matmul: MatMul, a: Tensor, b: Tensor | Codes, bias_N: Tensor | None, seed: int | None, dtype: torch.dtype
) -> Tensor:
    _check(matmul, a, b, bias_N)
    batched = max(a.dim(), len(b.shape)) > 2
    inner = min(a.dtype, dtype, key=lambda dtype: dtype.itemsize)
    gemm = TORCH if batched else gemm_for(matmul, inner, matmul.sizes(a.shape, b.shape), backend_for(a.device))
    if bias_N is not None:
        bias_N = bias_N.to(inner if gemm is TORCH else torch.promote_types(inner, torch.float32))
    if gemm.packed:
        result = gemm.run(matmul, packed(matmul.a, a, seed), packed(matmul.b, b, seed), bias_N)
    else:
        left = _values(matmul.a, a, gemm.a_dtype or inner, seed)
        right = _values(matmul.b, b, gemm.b_dtype or inner, seed)
        result = gemm.run(matmul, left, right, bias_N)
    if matmul.result is None:
        return result.to(dtype)
    return quantize(result, matmul.result, -1, offset_seed(seed, matmul.result_seed), dtype)


def _check(matmul: MatMul, a: Tensor, b: Tensor | Codes, bias: Tensor | None) -> None:
    """ValueError for operands and a bias that do not fit each other: the kernels read memory as their shapes say."""
    a_axis, b_axis = matmul.contracted()
    if min(a.dim(), len(b.shape)) < 2 or a.shape[a_axis - 2] != b.shape[b_axis - 2]:
        raise ValueError(f"a and b must share the axis summed over, got {tuple(a.shape)} and {tuple(b.shape)}")
    columns = b.shape[-1 - b_axis]
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias must be ({columns},), got {tuple(bias.shape)}")
    if isinstance(b, Codes) and matmul.b.format is not None:  # saved-tensor hooks may give back anything
        check_codes(b.codes, b.scales, matmul.b.format, Layout.of(b.shape, matmul.b.axis))


def packed(operand: Operand, x: Tensor | Codes, seed: int | None) -> Codes:
    """``x`` in the bits of ``operand``, which has a format."""
    if isinstance(x, Codes):
        return x
    return Codes(*pack(x, _format(operand), operand.axis, offset_seed(seed, operand.seed)), x.shape)


def _values(operand: Operand, x: Tensor | Codes, dtype: torch.dtype, seed: int | None) -> Tensor:
    """The operand as it is multiplied."""
    if isinstance(x, Codes):
        values = unpack(x.codes, x.scales, _format(operand), x.shape, operand.axis, dtype)
    elif operand.format is None:
        values = x.to(dtype)
    else:
        values = quantize(x, operand.format, operand.axis, offset_seed(seed, operand.seed), dtype)
    return values.mT if operand.transposed else values


def _format(operand: Operand) -> Format:
    assert operand.format is not None
    return operand.format


def offset_seed(seed: int | None, offset: int) -> int | None:
    """The seed of one tensor of a product, which has random numbers of its own; None rounds to nearest."""
    return None if seed is None else seed + offset


def _operator(
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    shape: list[int] | None,
    bias: Tensor | None,
    matmul: str,
    seed: int | None,
    dtype: torch.dtype,
) -> Tensor:
    operand = b if scales is None or shape is None else Codes(b, scales, torch.Size(shape))
    return _multiply(parse_matmul(matmul), a, operand, bias, seed, dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    scales: Tensor | None,
    shape: Any,
    bias: Tensor | None,
    matmul: str,
    seed: int | None,
    dtype: torch.dtype,
) -> Tensor:
    b_shape = b.shape if shape is None else shape
    sizes = parse_matmul(matmul).sizes(a.shape, b_shape)
    return a.new_empty((*torch.broadcast_shapes(a.shape[:-2], b_shape[:-2]), *sizes[:2]), dtype=dtype)


def _flops(a_shape: Any, b_shape: Any, _: Any, shape: Any, bias: Any, matmul: str, *__: Any, **___: Any) -> int:
    b_shape = b_shape if shape is None else shape
    sizes = parse_matmul(matmul).sizes(a_shape, b_shape)
    return 2 * prod((*torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]), *sizes))


# b: values; or codes, with their scales and the shape of the values
define(
    "multiply(Tensor a, Tensor b, Tensor? scales, SymInt[]? shape, Tensor? bias, str matmul, SymInt? seed,"
    " ScalarType dtype) -> Tensor",
    _operator,
    _fake,
)
register_flop_formula(torch.ops.dsq.multiply)(_flops)


def _refuse(ctx: Any, dy: Tensor) -> None:
    raise RuntimeError(
        "a quantised product has no gradient of its own: dsq layers are differentiable once (no create_graph, no "
        "torch.func.grad of torch.func.grad), and not in a graph of torch.export, which keeps the forward alone"
    )


register_autograd("dsq::multiply", _refuse)
