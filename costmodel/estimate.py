"""One configuration (or an array of them) costed from first principles: the sums the commands print."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.arithmetic import arithmetic_cost, multiplier_bits, products
from costmodel.formats import Bits, Format, Precision
from costmodel.hardware import Hardware
from costmodel.operations import Workload
from costmodel.roofline import ZERO, Floor, floors
from costmodel.traffic import charges, total_stash_bytes

#: what "relative" is relative to in both profiles: fixed-point 32 (paper, table 1)
REFERENCE = (Precision(32, 32, 32, 32), Format("fixed"))


@dataclass(frozen=True)
class Estimate:
    """Costs of one training step; every field may be an array with one entry a configuration."""

    dram_bytes: Bits
    stash_bytes: Bits  #: what converted layers hold between forward and backward
    arithmetic: Bits  #: in fixed-point 32 x 32 multiply-accumulates
    multiplier_bits: Bits  #: sum of m1 * m2 over multiply-accumulates
    classes: dict[str, Floor]

    @property
    def total(self) -> Floor:
        return sum(self.classes.values(), start=ZERO)


def evaluate(workload: Workload, precision: Precision, fmt: Format, hardware: Hardware) -> Estimate:
    """Cost of one training step. `precision`'s widths may be arrays. Raises ValueError if the hardware lacks a
    datatype."""
    moved = charges(workload, precision, fmt, hardware.on_chip_bytes)
    multiplied = products(workload, precision, fmt.kind)
    dram: Bits = 0
    for charge in moved:
        dram = dram + charge.total
    return Estimate(
        dram_bytes=dram,
        stash_bytes=total_stash_bytes(workload, precision, fmt),
        arithmetic=arithmetic_cost(multiplied),
        multiplier_bits=multiplier_bits(multiplied),
        classes=floors(moved, multiplied, hardware),
    )
