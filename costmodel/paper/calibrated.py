"""The `paper` profile: the cost model behind the published tables 1 and 6, rebuilt from named assumptions.

DRAM: every linear layer moves the eight tensors of TENSORS, each stored at stored_bits a value. Arithmetic: its three
matrix products cost K * (m1 * m2)^p (the law of the format) at the widths of MATMULS. Both are relative to fixed-point
32. No attention, norms, caches or optimiser: figure 2 draws a linear layer, and the published ratios leave no room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from costmodel.model.methods import Setup
from costmodel.model.operations import Gemm, Workload
from dsq.arguments import whole_number
from dsq.formats import WIDEST, FixedPoint, Format, Identity

#: a box (values and exponent) is stored in whole words of this many bits; it makes BFP 32 cost 36 bits a value
#: (1.13x) and BFP 16 20 (0.63x)
WORD_BITS = 64

#: axes and width of the tensors that cross the DRAM boundary, each once: M tokens, K in-features, N out-features
TENSORS = (
    ("MK", "q0"),  # x, read in the forward: x_l enters the forward product (figure 2)
    ("NK", "q0"),  # w, read in the forward: w_l enters the forward product (figure 2)
    ("MN", "q0"),  # y, written: x_(l+1), the next layer's input (figure 2)
    ("MK", "q1"),  # the stash, written: intermediate results are stashed in DRAM (section 3)
    ("MK", "q1"),  # the stash, read in the backward: x_l is the quantised version fetched from DRAM (figure 2)
    ("NK", "q1"),  # w, read in the backward: the work "includes quantization of stashed weights" (section 2)
    ("MN", "q2"),  # dy, read: dx_(l+1) is fetched from DRAM (figure 2)
    ("MK", "q3"),  # dx, written: dx_l is always flushed to DRAM (section 3)
)
#: operand widths that each matrix product's multipliers are built for
MATMULS = (
    ("q0", "q0"),  # forward: q0 sets the arithmetic density of the forward pass (section 3)
    # dx: q2 sets the first backward product (section 3); w's port keeps the forward's width (4x4 would make fixed
    # [16,4,4,16] 0.109x, not 0.13x)
    ("q2", "q0"),
    ("q3", "q1"),  # dw: q3 sets the second backward product; x is read at q1 (section 3)
)

#: setup -> the assumption that its published figure chose; the other setups' figures are tests of the model
FITTED_ARITHMETIC = {
    "fixed [32,32,32,32]": "unit",
    "fixed [16,16,16,16]": "p fixed",
    "bfp [32,32,32,32]": "K bfp",
    "bfp [16,16,16,16]": "p bfp",
    "fixed [16,4,4,16]": "MATMULS",
}
FITTED_DRAM = {"fixed [32,32,32,32]": "unit", "bfp [32,32,32,32]": "WORD_BITS", "fixed [16,4,4,16]": "TENSORS"}


def stored_bits(bits: int, template: Format) -> float:
    """Bits a value takes in DRAM: ceil((box * m + scale) / 64) * 64 / box where the format has boxes, else m."""
    if not template.box:
        return bits
    words = -(-(template.box * bits + template.scale_bits) // WORD_BITS)
    return words * WORD_BITS / template.box


def dram(workload: Workload, setup: Setup) -> float:
    """DRAM traffic of a step's linear layers, relative to fixed-point 32. Raises ValueError if there is none."""
    if isinstance(setup.format, Identity):
        raise ValueError("the paper profile costs no float, only quantised formats: use --profile first-principles")
    layers = [gemm for gemm in workload.gemms if gemm.weight]
    if not layers:
        raise ValueError(f"workload {workload.name!r} has no linear layer, and the paper profile costs nothing else")
    values = [sum(_values(gemm, shape) for gemm in layers) for shape, _ in TENSORS]
    stored = [stored_bits(getattr(setup.precision, width), setup.format) for _, width in TENSORS]
    bits = sum(count * width for count, width in zip(values, stored, strict=True))
    return bits / (sum(values) * WIDEST)


def arithmetic(setup: Setup) -> float:
    """Cost of a multiply-accumulate, the mean of the three matrix products, relative to a fixed-point 32 x 32 one."""
    pairs = ([getattr(setup.precision, width) for width in widths] for widths in MATMULS)
    costs = sum((setup.format.law.cost(*pair) for pair in pairs), start=0.0)
    return float(costs / len(MATMULS) / FixedPoint.law.cost(WIDEST, WIDEST))


def _values(gemm: Gemm, shape: str) -> int:
    size = {"M": gemm.M, "K": gemm.K, "N": gemm.N}
    return size[shape[0]] * size[shape[1]] * (gemm.weights if shape == "NK" else 1)


@dataclass(frozen=True)
class Cost:
    """Costs relative to fixed-point 32."""

    arithmetic: float
    dram: float


def level_costs(workload: Workload, setups: Sequence[Setup]) -> list[Cost]:
    """The cost of a step at each level."""
    return [Cost(arithmetic(setup), dram(workload, setup)) for setup in setups]


def weighed(costs: Sequence[Cost], shares: Sequence[float]) -> Cost:
    """The mean of the levels' costs by their shares of the work."""
    pairs = list(zip(costs, shares, strict=True))
    return Cost(sum(it.arithmetic * share for it, share in pairs), sum(it.dram * share for it, share in pairs))


def shares(rises: Sequence[float]) -> list[float]:
    """Each level's share of a run whose levels but the first begin at these shares of it."""
    return [after - before for before, after in pairwise((0.0, *rises, 1.0))]


def rising_shares(rises: Sequence[float], total_updates: int) -> list[float]:
    """Each level's share of a run whose rises are shares or updates of it; none where that is not known."""
    whole_number("total_updates", total_updates, 0)
    if not rises or (rises[-1] >= 1 and not total_updates):
        return []
    return shares([rise if rise < 1 else min(rise / total_updates, 1.0) for rise in rises])
