"""A product of two activations at [q0, q1, q2]: attention's scores, or its weights by its values.

    forward    y  = Q0(a) Q0(b)              stash Q1(a) and Q1(b), packed
    backward   da = Q2(dy) Q1(b)^T           db = Q1(a)^T Q2(dy)

Boxes run along the contraction of the product that consumes the tensor. Shape suffixes: M rows, K the contraction,
N columns; any leading dimensions are batches, and broadcast: the stash is of each operand as it came.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import Format
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.ops.linear_passes import autocast_dtype, forward_mode
from dsq.ops.matmul import multiply, packed

#: seeds that one product may take: those of its operands (product_matmuls) are offsets below this
SEEDS = 8


class ProductMatMuls(NamedTuple):
    """The three products."""

    output: MatMul  #: of a and b
    a_gradient: MatMul  #: of dy and the packed b
    b_gradient: MatMul  #: of dy and the packed a: its transpose


@lru_cache(maxsize=1024)
def product_matmuls(q0: Format, q1: Format, q2: Format) -> ProductMatMuls:
    """The products at these formats; a format wider than any code leaves values as they are.

    q0: of both operands in the forward; q1: of both as the backward reads them; q2: of the gradient of the result.
    """
    f0, f1, f2 = (q if q.packs else None for q in (q0, q1, q2))
    return ProductMatMuls(
        MatMul(Operand(f0, -1, seed=0), Operand(f0, -2, seed=1)),
        MatMul(Operand(f2, -1, seed=4), Operand(f1, -1, transposed=True, seed=3)),  # sums over N
        MatMul(Operand(f2, -2, transposed=True, seed=5), Operand(f1, -2, seed=2)),  # sums over M
    )


def product(a_MK: Tensor, b_KN: Tensor, matmuls: ProductMatMuls, seed: int | None = None) -> Tensor:
    """``a @ b`` with every operand quantised; differentiable once.

    Args:
        a_MK: (..., M, K). b_KN: (..., K, N), of the same dtype and device; leading dimensions broadcast. Under autocast
            dtypes may differ, the operands are quantised as they are, and y is in autocast's dtype.
        matmuls: product_matmuls(q0, q1, q2).
        seed: None rounds to nearest, a number stochastically.
    Raises:
        TypeError: dtypes that differ. ValueError: shapes that do not fit.
    """
    autocast = autocast_dtype(a_MK)
    if autocast is None and a_MK.dtype != b_KN.dtype:
        raise TypeError(f"a and b must share a floating dtype, got {a_MK.dtype} and {b_KN.dtype}")
    _check(a_MK, b_KN)
    if (torch.is_grad_enabled() and (a_MK.requires_grad or b_KN.requires_grad)) or forward_mode():
        # while torch.compile traces, the stack is never None
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("a quantised product of two activations does not go with torch.func")
        y: Tensor = _Product.apply(a_MK, b_KN, matmuls, seed, autocast)  # type: ignore[no-untyped-call]
        return y
    return multiply(matmuls.output, a_MK, b_KN, seed=seed, dtype=autocast)


def _check(a_MK: Tensor, b_KN: Tensor) -> None:
    try:
        torch.broadcast_shapes(a_MK.shape[:-2], b_KN.shape[:-2])
        fits = min(a_MK.dim(), b_KN.dim()) >= 2 and a_MK.shape[-1] == b_KN.shape[-2]
    except RuntimeError:
        fits = False
    if not fits:
        shapes = f"{tuple(a_MK.shape)} and {tuple(b_KN.shape)}"
        raise ValueError(f"a must be (..., M, K) and b (..., K, N), got {shapes}")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a_MK: Tensor, b_KN: Tensor, matmuls: ProductMatMuls, seed: int | None, dtype: torch.dtype | None
    ) -> Tensor:
        a1 = _kept(matmuls.b_gradient.b, a_MK, seed) if ctx.needs_input_grad[1] else (None, None)
        b1 = _kept(matmuls.a_gradient.b, b_KN, seed) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(*a1, *b1)  # what hooks and the meter see
        ctx.shapes, ctx.matmuls, ctx.seed = (a_MK.shape, b_KN.shape), matmuls, seed
        return multiply(matmuls.output, a_MK, b_KN, seed=seed, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("a quantised product is differentiable once: create_graph=True is not supported")
        a1, a_scales, b1, b_scales = ctx.saved_tensors
        da_MK = db_KN = None
        if a1 is not None:  # attention's weights are unpacked before there is a gradient of their size
            a = a1 if a_scales is None else Codes(a1, a_scales, ctx.shapes[0])
            db_KN = multiply(ctx.matmuls.b_gradient, dy_MN, a, seed=ctx.seed).mT.sum_to_size(ctx.shapes[1])
        if b1 is not None:
            b = b1 if b_scales is None else Codes(b1, b_scales, ctx.shapes[1])
            da_MK = multiply(ctx.matmuls.a_gradient, dy_MN, b, seed=ctx.seed).sum_to_size(ctx.shapes[0])
        return da_MK, db_KN, None, None, None


def _kept(operand: Operand, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor | None]:
    """``x`` as it is kept for the backward: codes and scales, or itself."""
    if operand.format is None:
        return x, None
    codes, scales, _ = packed(operand, x, seed)
    return codes, scales
