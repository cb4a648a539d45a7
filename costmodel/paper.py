"""The `paper` profile: the cost model behind the published tables 1 and 6, rebuilt from named assumptions.

DRAM: every linear layer moves the eight tensors of TENSORS, each stored at STORAGE's bits a value. Arithmetic: its
three products cost K * (m1 * m2)^p (arithmetic.LAWS) at the widths of PRODUCTS. Both are relative to fixed-point 32.
No attention products, norms, caches or optimiser: figure 2 draws a linear layer, and the published ratios leave no
room for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.arithmetic import LAWS
from costmodel.formats import Bits, Format, Precision, ceil_div
from costmodel.operations import Gemm, Workload

#: a box (values and exponent) is stored in whole words of this many bits; it makes BFP 32 cost 36 bits a value
#: (1.13x) and BFP 16 20 (0.63x)
WORD_BITS = 64


@dataclass(frozen=True)
class Tensor:
    name: str
    phase: str
    direction: str
    shape: str  #: its axes, of M (tokens), K (in-features), N (out-features)
    width: str
    source: str


#: the tensors that cross the DRAM boundary, each once
TENSORS = (
    Tensor("x", "forward", "read", "MK", "q0", "figure 2: x_l enters the forward product"),
    Tensor("w", "forward", "read", "NK", "q0", "figure 2: w_l enters the forward product"),
    Tensor("y", "forward", "write", "MN", "q0", "figure 2: x_(l+1), the next layer's input"),
    Tensor("stash", "forward", "write", "MK", "q1", "section 3: intermediate results are stashed in DRAM"),
    Tensor("stash", "backward", "read", "MK", "q1", "figure 2: x_l is the quantised version fetched from DRAM"),
    Tensor("w", "backward", "read", "NK", "q1", "section 2: the work 'includes quantization of stashed weights'"),
    Tensor("dy", "backward", "read", "MN", "q2", "figure 2: dx_(l+1) is fetched from DRAM"),
    Tensor("dx", "backward", "write", "MK", "q3", "section 3: dx_l is always flushed to DRAM"),
)

#: left out of TENSORS: with it the GLUE rows fit better and the DSQ rows worse (see `dsq-cost table`)
WEIGHT_GRADIENT = Tensor(
    "dw", "backward", "write", "NK", "q3", "figure 2 computes dw but does not say that it is flushed"
)


@dataclass(frozen=True)
class Multiplied:
    name: str
    widths: tuple[str, str]
    source: str


#: operand widths each product's multipliers are built for
PRODUCTS = (
    Multiplied("forward", ("q0", "q0"), "section 3: q0 sets the arithmetic density of the forward pass"),
    Multiplied(
        "dx",
        ("q2", "q0"),
        "section 3: q2 sets the first backward product; w's port keeps the forward's width "
        "(4x4 would make fixed [16,4,4,16] 0.109x, not 0.13x)",
    ),
    Multiplied("dw", ("q3", "q1"), "section 3: q3 sets the second backward product; x is read at q1"),
)


@dataclass(frozen=True)
class Moved:
    """Totals over a workload's linear layers."""

    tensor: Tensor
    values: int
    bits_a_value: Bits

    @property
    def bytes(self) -> Bits:
        return self.values * self.bits_a_value / 8


def stored_bits(bits: Bits, fmt: Format) -> Bits:
    """Bits a value takes in DRAM: BFP ceil((box * m + exponent) / 64) * 64 / box, fixed-point m."""
    if fmt.kind == "bfp":
        return ceil_div(fmt.box * bits + fmt.exponent_bits, WORD_BITS) * WORD_BITS / fmt.box
    return bits


def moved(workload: Workload, precision: Precision, fmt: Format, tensors: tuple[Tensor, ...] = TENSORS) -> list[Moved]:
    """The tensors the linear layers of the workload move in one step. Raises ValueError if there is nothing to cost."""
    _check(workload, fmt)
    found = []
    for tensor in tensors:
        values = sum(_values(gemm, tensor.shape) for gemm in workload.gemms if gemm.weight)
        found.append(Moved(tensor, values, stored_bits(getattr(precision, tensor.width), fmt)))
    return found


def dram(workload: Workload, precision: Precision, fmt: Format, tensors: tuple[Tensor, ...] = TENSORS) -> Bits:
    """DRAM traffic relative to fixed-point 32."""
    found = moved(workload, precision, fmt, tensors)
    total: Bits = 0.0
    for tensor in found:
        total = total + tensor.bytes
    return total / (sum(tensor.values for tensor in found) * 32 / 8)


def arithmetic(precision: Precision, fmt: Format) -> Bits:
    """Cost of the three products relative to fixed-point 32; each runs the same multiply-accumulates, so it is their
    mean."""
    law = LAWS[fmt.kind]
    total: Bits = 0.0
    for product in PRODUCTS:
        m1, m2 = (getattr(precision, width) for width in product.widths)
        total = total + law.cost(m1, m2) / LAWS["fixed"].cost(32, 32)
    return total / len(PRODUCTS)


def _values(gemm: Gemm, shape: str) -> int:
    size = {"M": gemm.M, "K": gemm.K, "N": gemm.N}
    return size[shape[0]] * size[shape[1]]


def _check(workload: Workload, fmt: Format) -> None:
    if fmt.kind == "float":
        raise ValueError("the paper profile knows fixed and bfp, not float: use --profile first-principles")
    if not any(gemm.weight for gemm in workload.gemms):
        raise ValueError(f"workload {workload.name!r} has no linear layer, and the paper profile costs nothing else")
