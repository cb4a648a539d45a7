"""A product of two activations at [q0, q1, q2, q3]: one head's attention scores, say.

    forward    y  = Q0(a) Q0(b)              stash Q1(a) and Q1(b), packed
    backward   da = Q2(dy) Q1(b)^T           db = (Q2(dy)^T Q1(a))^T

Shape suffixes: M rows, K the contraction, N columns.
"""

from typing import Any

import torch
from torch import Tensor

from dsq.formats import Format
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.ops.matmul import multiply, packed


def product(a_MK: Tensor, b_KN: Tensor, q0: Format, q1: Format, q2: Format) -> Tensor:
    """``a @ b`` with every operand quantised, boxes along the contraction; differentiable once."""
    y: Tensor = _Product.apply(a_MK, b_KN, q0, q1, q2)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_MK: Tensor, b_KN: Tensor, q0: Format, q1: Format, q2: Format) -> Tensor:
        ctx.da = MatMul(Operand(q2, 1), Operand(q1, 1, transposed=True))  # sums over N
        ctx.db = MatMul(Operand(q2, 0, transposed=True), Operand(q1, 0))  # sums over M
        a1, b1 = packed(ctx.db.b, a_MK, seed=None), packed(ctx.da.b, b_KN, seed=None)
        ctx.save_for_backward(a1.codes, a1.scales, b1.codes, b1.scales)  # what hooks and the meter see
        ctx.shapes = a1.shape, b1.shape
        return multiply(MatMul(Operand(q0, 1), Operand(q0, 0)), a_MK, b_KN)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        a_codes, a_scales, b_codes, b_scales = ctx.saved_tensors
        da_MK = multiply(ctx.da, dy_MN, Codes(b_codes, b_scales, ctx.shapes[1]))
        db_KN = multiply(ctx.db, dy_MN, Codes(a_codes, a_scales, ctx.shapes[0])).t()
        return da_MK, db_KN, None, None, None
