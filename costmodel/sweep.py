"""Every configuration in a range at once, and those no other one beats.

Cost alone always prefers fewer bits, so the front needs something to trade it against: `noise`, the power of the
rounding errors that reach one linear layer's y, dx and dw, relative to the largest value of a box (or tensor). It is
a first-order stand-in that ranks configurations of one format, not a prediction of accuracy.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

from costmodel.estimate import REFERENCE, Estimate, evaluate
from costmodel.formats import WIDEST_PACKED, Bits, Format, Precision
from costmodel.hardware import Hardware
from costmodel.operations import Workload

#: columns a front may be taken over; all are better when smaller
OBJECTIVES = ("dram", "arithmetic", "stash", "time", "noise")
FP32_BITS = 25  #: significand and sign of the fp32 value kept above 16 bits


@dataclass(frozen=True)
class Sweep:
    """Configurations of one format and their costs, one entry each."""

    format: Format
    precision: Precision
    estimate: Estimate
    columns: dict[
        str, np.ndarray
    ]  #: OBJECTIVES; dram and arithmetic relative to fixed-point 32, time in seconds, noise in dB

    def __len__(self) -> int:
        return len(self.columns["dram"])


def parse_range(text: str) -> list[int]:
    """'2:16', '2:16,32' or '4' -> widths. Raises ValueError."""
    widths: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*:\s*(\d+))?\s*", part)
        if not match or not 2 <= int(match[1]) <= int(match[2] or match[1]) <= 32:
            raise ValueError(f"range {text!r} is malformed: write widths from 2 to 32 such as 4, 2:8 or 2:16,32")
        widths.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(widths)


def grid(ranges: list[list[int]]) -> Precision:
    """All combinations of the four ranges, as arrays."""
    table = np.array(list(itertools.product(*ranges)), dtype=np.int64)
    return Precision(*table.T)


def sweep(workload: Workload, precision: Precision, fmt: Format, hardware: Hardware) -> Sweep:
    """Cost every configuration."""
    estimate = evaluate(workload, precision, fmt, hardware)
    reference = evaluate(workload, *REFERENCE, hardware)
    size = len(precision.q0)
    columns = {
        "dram": estimate.dram_bytes / reference.dram_bytes,
        "arithmetic": estimate.arithmetic / reference.arithmetic,
        "stash": estimate.stash_bytes,
        "time": estimate.total.seconds,
        "noise": noise_decibels(precision),
    }
    spread = {name: np.broadcast_to(np.asarray(column, dtype=float), (size,)) for name, column in columns.items()}
    return Sweep(fmt, precision, estimate, spread)


def noise_decibels(precision: Precision) -> Bits:
    """10 log10 of the summed relative rounding noise of y, dx and dw: [2 e0] + [e2 + e1 + e3] + [e3 + e1], where
    e(m) = step^2 / 12 with step = 2^-(m-2) is the noise of nearest rounding to m bits, relative to the box's top
    binade."""
    e0, e1, e2, e3 = (_rounding_noise(width) for width in precision.widths)
    return 10 * np.log10(2 * e0 + 2 * e1 + e2 + 2 * e3)


def _rounding_noise(bits: Bits) -> Bits:
    kept = np.where(np.asarray(bits) > WIDEST_PACKED, FP32_BITS, bits)
    return np.power(4.0, -(kept - 2.0)) / 12


def pareto(columns: list[np.ndarray]) -> np.ndarray:
    """Mask of the points no other point beats: nowhere larger and somewhere smaller. Of equal points the first
    stays."""
    points = np.column_stack(columns)
    order = np.lexsort(points.T[::-1])
    # in this order nothing later beats anything earlier: one pass that discards what each survivor beats or equals
    alive = points[order]
    indices = order
    front = []
    while len(indices):
        front.append(indices[0])
        beaten = np.all(alive >= alive[0], axis=1)
        alive, indices = alive[~beaten], indices[~beaten]
    mask = np.zeros(len(points), dtype=bool)
    mask[front] = True
    return mask
