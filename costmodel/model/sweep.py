"""Every configuration in a range at once, and those no other one beats.

Cost alone always prefers fewer bits, so the front needs something to trade it against: `noise`, the power of the
rounding errors that reach one linear layer's y, dx and dw, relative to the largest value of a box (or tensor). It is
a first-order stand-in that ranks configurations of one format, not a prediction of accuracy.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from costmodel.hardware.hardware import Hardware
from costmodel.model.estimate import REFERENCE, evaluate
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Bits, PrecisionGrid, Setup, by_width
from dsq.formats import MAX_PACKED_BITS, NARROWEST, WIDEST
from dsq.precision import Precision

#: columns a front may be taken over; all are better when smaller
OBJECTIVES = ("dram", "arithmetic", "stash", "time", "noise")
FP32_BITS = 25  #: significand and sign of the fp32 value kept above 16 bits
Column = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def parse_range(text: str) -> list[int]:
    """'2:16', '2:16,32' or '4' -> widths. Raises ValueError."""
    widths: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*:\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not NARROWEST <= first <= last <= WIDEST:
            raise ValueError(f"range must be widths in {NARROWEST}..{WIDEST} such as 4, 2:8 or 2:16,32, got {text!r}")
        widths.update(range(first, last + 1))
    return sorted(widths)


def grid(ranges: Sequence[Sequence[int]]) -> PrecisionGrid:
    """All combinations of the four ranges."""
    return PrecisionGrid(*(axis.ravel() for axis in np.meshgrid(*map(np.array, ranges), indexing="ij")))


def sweep(workload: Workload, setup: Setup, hardware: Hardware, relative_to: Setup = REFERENCE) -> dict[str, Column]:
    """OBJECTIVES of each configuration of the setup's precision grid: dram and arithmetic relative to a setup,
    stash in bytes, time in seconds, noise in dB."""
    estimate, reference = (evaluate(workload, costed, hardware) for costed in (setup, relative_to))
    columns = {
        "dram": estimate.dram_bytes / reference.dram_bytes,
        "arithmetic": estimate.arithmetic / reference.arithmetic,
        "stash": estimate.stash_bytes,
        "time": estimate.total.seconds,
        "noise": noise_decibels(setup.precision),
    }
    shape = np.shape(setup.precision.q0)
    return {name: np.broadcast_to(np.asarray(column, dtype=float), shape) for name, column in columns.items()}


def noise_decibels(precision: Precision | PrecisionGrid) -> Bits:
    """10 log10 of the summed relative rounding noise of y, dx and dw: [2 e0] + [e2 + e1 + e3] + [e3 + e1], where
    e(m) = step^2 / 12 with step = 2^-(m-2) is the noise of nearest rounding to m bits, relative to the box's top
    binade."""
    e0, e1, e2, e3 = (by_width(bits, _rounding_noise) for bits in precision)
    return 10 * np.log10(2 * e0 + 2 * e1 + e2 + 2 * e3)


def _rounding_noise(bits: int) -> float:
    step = 2.0 ** (2 - (bits if bits <= MAX_PACKED_BITS else FP32_BITS))
    return step * step / 12


def pareto(columns: Sequence[Column]) -> Mask:
    """Mask of the points no other point beats: nowhere larger and somewhere smaller. Of equal points the first
    stays."""
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns]
    order = np.argsort(sum(ranks), kind="stable")
    # in this order nothing later beats anything earlier, and what beats most comes early: one pass that discards what
    # each survivor beats or equals
    alive, indices = [rank[order].astype(np.int32) for rank in ranks], order
    front = []
    while len(indices):
        front.append(indices[0])
        kept = np.logical_or.reduce([rank < rank[0] for rank in alive])
        alive, indices = [rank[kept] for rank in alive], indices[kept]
    mask = np.zeros(len(order), dtype=bool)
    mask[front] = True
    return mask
