"""One setup costed from first principles: the sums that commands print."""

from dataclasses import dataclass

from costmodel.hardware.hardware import Hardware
from costmodel.model.arithmetic import arithmetic_cost, matmuls
from costmodel.model.memory import saved_bytes
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup
from costmodel.model.roofline import ZERO, Floor, floors
from costmodel.model.traffic import total_stash_bytes, transfers


@dataclass(frozen=True)
class Estimate:
    """Costs of one training step."""

    dram_bytes: int
    stash_bytes: int  #: held by converted layers between forward and backward
    saved_bytes: float  #: held by the whole model, converted layers included
    arithmetic: float  #: in fixed-point 32 x 32 multiply-accumulates
    classes: dict[str, Floor]

    @property
    def total(self) -> Floor:
        return sum(self.classes.values(), start=ZERO)


def evaluate(workload: Workload, setup: Setup, hardware: Hardware) -> Estimate:
    """Cost of one training step. Raises ValueError if the hardware lacks a datatype."""
    moved = transfers(workload, setup, hardware.on_chip_bytes)
    multiplied = matmuls(workload, setup)
    return Estimate(
        dram_bytes=sum(transfer.total for transfer in moved),
        stash_bytes=total_stash_bytes(workload, setup),
        saved_bytes=saved_bytes(workload, setup),
        arithmetic=arithmetic_cost(multiplied),
        classes=floors(moved, multiplied, hardware, setup.container_bits),
    )
