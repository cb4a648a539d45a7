"""Multiply-accumulates by operand widths, and what one costs under its format's law.

A training step multiplies, in each linear layer, q0 x q0 (forward), q2 x q1 (dx = Q2(dy) Q1(w)) and q3 x q1
(dw = Q3(dy)^T Q1(x)); of attention's products, where they are quantised, both gradients take Q2(dy). Matrix products no
quantiser touches multiply containers of width a as floating point.
"""

from dataclasses import dataclass

from costmodel.model.operations import Gemm, Group, Workload
from costmodel.model.quantisation import Setup, at_width
from dsq.formats import Format, Identity


@dataclass(frozen=True)
class CostedMatMul:
    """One matrix product of a group of operations: its multiply-accumulates, operand widths and format."""

    group: Group
    name: str  #: "forward", "dx", "dw" or "recompute"
    macs: int  #: multiply-accumulates of one operation of the group
    m1: int
    m2: int
    format: Format

    @property
    def total_macs(self) -> int:
        return self.macs * self.group.count

    @property
    def values(self) -> int:
        """Values in the operands and the result of one operation of the group."""
        op = self.group.operation
        assert isinstance(op, Gemm)
        return op.batch * (op.M * op.K + op.weights * op.N * op.K + op.M * op.N)

    @property
    def operand_values(self) -> int:
        """Values in the two operands of one operation of the group."""
        op = self.group.operation
        assert isinstance(op, Gemm)
        x, w, y = op.M * op.K, op.weights * op.N * op.K, op.M * op.N
        return op.batch * {"dx": y + w, "dw": y + x}.get(self.name, x + w)

    @property
    def operands(self) -> tuple[int, int]:
        """Widths that the multiplier sees: all of a code, the significand of a float."""
        first, second = (at_width(self.format, bits) for bits in (self.m1, self.m2))
        return first.multiplier_bits, second.multiplier_bits


def matmuls(workload: Workload, setup: Setup) -> list[CostedMatMul]:
    """Every matrix product of one training step."""
    q, container = setup.precision, setup.container_bits
    listed = []
    for group in workload.groups:
        op = group.operation
        if not isinstance(op, Gemm):
            continue
        pairs = [("forward", q.q0, q.q0)]
        pairs += [("dx", q.q2, q.q1)] if op.x_grad else []
        pairs += [("dw", q.q3 if op.weight else q.q2, q.q1)] if op.w_grad else []
        pairs += [("recompute", q.q0, q.q0)] * op.recompute
        for name, m1, m2 in pairs:
            if op.quantised:
                listed.append(CostedMatMul(group, name, op.macs, m1, m2, setup.format))
            else:
                listed.append(CostedMatMul(group, name, op.macs, container, container, Identity()))
    return listed


def arithmetic_cost(listed: list[CostedMatMul]) -> float:
    """Cost of the matrix products in fixed-point 32 x 32 multiply-accumulates."""
    return sum((matmul.total_macs * matmul.format.law.cost(*matmul.operands) for matmul in listed), start=0.0)
