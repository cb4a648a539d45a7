"""Energy of a training step: bytes to and from DRAM, and the multiply-accumulates of matrix products.

Registers, on-chip memory, instructions, idle units and pointwise arithmetic are not counted: a difference between two
setups is a difference of these two terms, the sum is no power reading.
"""

from dataclasses import dataclass

from costmodel.hardware.hardware import Hardware
from costmodel.model.arithmetic import CostedMatMul
from costmodel.model.quantisation import at_width
from costmodel.model.traffic import Transfer

PICO = 1e-12


@dataclass(frozen=True)
class Energy:
    """Joules of one step of one configuration."""

    dram: float
    products: float

    @property
    def total(self) -> float:
        return self.dram + self.products


def energy(moved: list[Transfer], listed: list[CostedMatMul], hardware: Hardware) -> Energy | None:
    """None where the hardware does not state the energy of a byte, or of a product that the step has."""
    products = 0.0
    for matmul in listed:
        rate = hardware.rate(at_width(matmul.format, int(matmul.m1)), at_width(matmul.format, int(matmul.m2)))
        if not rate.peak.pj_per_mac:
            return None
        products += matmul.total_macs * rate.passes * rate.peak.pj_per_mac
    if not hardware.dram_pj_per_byte:
        return None
    nbytes = sum(float(transfer.total) for transfer in moved)
    return Energy(PICO * nbytes * hardware.dram_pj_per_byte, PICO * products)
