"""Multiply-accumulates by operand widths, and what one costs under a stated law a format.

A training step multiplies, in each linear layer, q0 x q0 (forward), q2 x q1 (dx = Q2(dy) Q1(w)) and q3 x q1
(dw = Q3(dy)^T Q1(x)). Products no quantiser touches multiply containers of width a as floating point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.formats import Bits, Precision, container_bits
from costmodel.operations import Gemm, Group, Workload, grouped


@dataclass(frozen=True)
class Law:
    """cost(m1, m2) = K * (m1 * m2)^p, in units of one fixed-point 32 x 32 multiply-accumulate."""

    K: float
    p: float
    source: str

    def cost(self, m1: Bits, m2: Bits) -> Bits:
        return self.K * (np.multiply(m1, m2, dtype=float)) ** self.p


#: the law of a multiplier array: one full adder for each pair of bits
FIXED_LAW = Law(
    1 / 32**2,
    1.0,
    "array multiplier: one cell for each pair of operand bits; table 1's 16x16 row, 0.25 = (16*16)/(32*32)",
)
#: two constants, from the two all-equal BFP rows of table 1: 0.56 at 32 bits and 0.18 at 16, p = ln(0.56/0.18)/ln(4)
#: = 0.82
BFP_LAW = Law(
    0.56 / 32 ** (2 * 0.82),
    0.82,
    "table 1's BFP [32,32,32,32] 0.56x and [16,16,16,16] 0.18x; p = ln(0.56/0.18)/ln 4 to two digits",
)
LAWS: dict[str, Law] = {"bfp": BFP_LAW, "fixed": FIXED_LAW, "float": FIXED_LAW}

#: multiplier width of a floating-point container: its significand, hidden bit included
SIGNIFICAND = {32: 24, 16: 11}


@dataclass(frozen=True)
class Product:
    """One matrix product of a group: its multiply-accumulates (an operation), operand widths and format."""

    group: Group
    name: str  #: "forward", "dx", "dw" or "recompute"
    macs: int
    m1: Bits
    m2: Bits
    kind: str

    @property
    def total(self) -> int:
        return self.macs * self.group.count


def products(workload: Workload, precision: Precision, kind: str) -> list[Product]:
    """Every matrix product of one training step with the widths it multiplies; widths may be arrays."""
    q = precision
    container = container_bits(precision)
    found = []
    for group in grouped(workload):
        op = group.operation
        if not isinstance(op, Gemm):
            continue
        pairs = [("forward", q.q0, q.q0)]
        pairs += [("dx", q.q2, q.q1)] if op.x_grad else []
        pairs += [("dw", q.q3, q.q1)] if op.w_grad else []
        pairs += [("recompute", q.q0, q.q0)] * op.recompute
        for name, m1, m2 in pairs:
            widths, of = ((m1, m2), kind) if op.quantised else ((container, container), "float")
            found.append(Product(group, name, op.macs, *widths, of))
    return found


def multiplier_width(bits: Bits, kind: str) -> Bits:
    """Bits a multiplier works on: all of a fixed-point or BFP code, the significand of a float."""
    return (
        np.where(np.asarray(bits) > 16, SIGNIFICAND[32], np.minimum(bits, SIGNIFICAND[16])) if kind == "float" else bits
    )


def arithmetic_cost(found: list[Product]) -> Bits:
    """Cost of the products in fixed-point 32 x 32 multiply-accumulates."""
    total: Bits = 0.0
    for product in found:
        m1, m2 = (multiplier_width(m, product.kind) for m in (product.m1, product.m2))
        total = total + product.total * LAWS[product.kind].cost(m1, m2)
    return total


def multiplier_bits(found: list[Product]) -> Bits:
    """Sum of m1 * m2 over every multiply-accumulate: the multiplier-bits of the step, free of any law."""
    total: Bits = 0.0
    for product in found:
        m1, m2 = (multiplier_width(m, product.kind) for m in (product.m1, product.m2))
        total = total + float(product.total) * np.multiply(m1, m2, dtype=float)
    return total
