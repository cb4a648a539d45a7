"""The paper's accounting, by bits: the cost model behind the published tables 1 and 6, rebuilt from named assumptions
(calibrated.toml).

DRAM: every linear layer moves the eight tensors of TENSORS, each stored at Setup.stored_bits a value. Arithmetic: its
three matrix products cost mac_cost at the widths of MATMULS. Both are relative to fixed-point 32. No
attention, norms, caches or optimizer: figure 2 draws a linear layer, and the published ratios leave no room.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dsq.arguments import whole_number
from dsq.command import read_toml
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.operations import Gemm, Workload
from dsq.costmodel.model.tiles import TiledProduct, bytes_again
from dsq.costmodel.model.traffic import mac_cost
from dsq.formats import WIDEST, FixedPoint
from dsq.precision import Precision

#: a block (values and exponent) is stored in whole words of this many bits; it makes BFP 32 cost 36 bits a value
#: (1.13x) and BFP 16 20 (0.63x)
WORD_BITS = 64

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
TENSORS: list[list[str]] = _DATA["tensors"]
MATMULS: list[list[str]] = _DATA["matmuls"]
#: axes of each product, and the widths of its operands and its result; "": a weight's gradient, which is not counted
PRODUCTS: list[list[str]] = _DATA["products"]
FIXED_32 = Setup(FixedPoint(WIDEST), Precision(WIDEST, WIDEST, WIDEST, WIDEST))
FITTED: dict[str, dict[str, str]] = _DATA["fitted"]  #: "arith", "dram" -> setup -> the assumption that it chose


#: the operand, by its name in dsq.operands, whose format each of the paper's widths is
_OPERAND = {"q0": "x", "q1": "x_for_dw", "q2": "dy_for_dx", "q3": "dy_for_dw"}


def dram(workload: Workload, setup: Setup, buffer: float = 0) -> float:
    """Return the DRAM traffic of a step's linear layers, relative to fixed-point 32; with a ``buffer`` of so many bytes
    on chip, what tiles fetch again too. Raises ValueError if there is no layer, or no tile fits."""
    bits, whole = (sum(moved_bits(workload, candidate, buffer).values()) for candidate in (setup, FIXED_32))
    return bits / whole


def moved_bits(workload: Workload, setup: Setup, buffer: float = 0, word: int = WORD_BITS) -> dict[str, float]:
    """Return the bits of `dram` by traffic.KINDS, with blocks in whole words of so many bits."""
    layers = [gemm for gemm in workload.gemms if gemm.weight]
    if not layers:
        raise ValueError(f"workload {workload.name!r} has no linear layer, which alone the paper's accounting costs")
    kinds = [*dict.fromkeys(kind for *_, kind in TENSORS), *(["again"] if buffer else [])]
    moved = [_bits(gemm, setup, buffer, word) for gemm in layers]
    return {kind: sum(bits.get(kind, 0) for bits in moved) for kind in kinds}


def _bits(gemm: Gemm, setup: Setup, buffer: float, word: int) -> dict[str, float]:
    """Return the bits that a layer moves."""
    size = {"M": -(-gemm.M // gemm.weights), "K": gemm.K, "N": gemm.N}
    width = {"": 0.0} | {name: setup.stored_bits(gemm, operand, word) for name, operand in _OPERAND.items()}
    bits = defaultdict[str, float](float)
    for axes, name, kind in TENSORS:
        bits[kind] += gemm.weights * size[axes[0]] * size[axes[1]] * width[name]
    for axes, *names in PRODUCTS if buffer else ():
        moved = tuple(width[name] / 8 for name in names)
        rows, summed, columns = (size[axis] for axis in axes)
        bits["again"] += gemm.weights * 8 * bytes_again(TiledProduct(rows, summed, columns, moved, moved), buffer)
    return bits


def arithmetic(setup: Setup) -> float:
    """Return the cost of a multiply-accumulate, the mean of the three matrix products, relative to a fixed-point 32 x
    32 one."""
    formats = {width: setup.operands[operand] for width, operand in _OPERAND.items()}
    costs = [mac_cost(formats[first], formats[second]) for first, second in MATMULS]
    return sum(costs) / len(costs) / mac_cost(FixedPoint(WIDEST), FixedPoint(WIDEST))


def rising_shares(rises: Sequence[float], total_updates: int = 0) -> list[float]:
    """Return each level's share of a run in which each level but the first begins at a share of it, or an update of it;
    none where that is not known."""
    whole_number("total_updates", total_updates, 0)
    if not rises or (rises[-1] >= 1 and not total_updates):
        return []
    begins = [rise if rise < 1 else min(rise / total_updates, 1.0) for rise in rises]
    return [after - before for before, after in pairwise((0.0, *begins, 1.0))]
