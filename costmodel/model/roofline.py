"""Roofline (Williams et al., 2009): intensity, ridge point, bound and time floor, per operation class and in total.

A kernel is one operation's forward, backward or update. Its floor is max(operations / peak, bytes / bandwidth):
matrix products run the fastest way their operands multiply exactly (Hardware.rate), pointwise passes at the vector rate
with one operation a value moved. A class's floor is the sum over its kernels; it is memory-bound if its bytes alone
take longer than its operations.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from costmodel.hardware.hardware import Hardware
from costmodel.model.arithmetic import MatMul
from costmodel.model.operations import CLASSES, Gemm, Group
from costmodel.model.quantisation import Bits, at_width, by_width
from costmodel.model.traffic import Transfer
from dsq.formats import WIDEST

FLOPS_PER_MAC = 2


@dataclass(frozen=True)
class Floor:
    """Totals of a set of kernels; every field may be an array with one entry a configuration."""

    flops: Bits
    bytes: Bits
    compute_seconds: Bits
    memory_seconds: Bits
    seconds: Bits  #: sum over kernels of the larger of the two

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(*(mine + vars(other)[name] for name, mine in vars(self).items()))

    @property
    def intensity(self) -> Bits:
        """Operations a DRAM byte."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> Bits:
        """The intensity above which this mix of datatypes is compute-bound: its mean peak over the bandwidth."""
        return self.intensity * self.memory_seconds / self.compute_seconds

    @property
    def memory_bound(self) -> Bits:
        return self.memory_seconds >= self.compute_seconds

    @property
    def flops_per_second(self) -> Bits:
        """Rate attained if every kernel runs at its floor."""
        return self.flops / self.seconds


ZERO = Floor(0.0, 0.0, 0.0, 0.0, 0.0)


def datatypes(listed: list[MatMul], cls: str, hardware: Hardware) -> str:
    """The datatypes that the class's matrix products run at, for one configuration: "bf16", "2 x bf16, bf16" or ""."""
    used = {
        str(hardware.rate(at_width(matmul.format, matmul.m1), at_width(matmul.format, matmul.m2)))
        for matmul in listed
        if matmul.group.operation.cls == cls
    }
    return ", ".join(sorted(used))


def floors(moved: list[Transfer], listed: list[MatMul], hardware: Hardware) -> dict[str, Floor]:
    """Floor of each operation class that has a kernel."""
    Kernel = tuple[Group, str]
    nbytes: dict[Kernel, Bits] = defaultdict(float)
    flops: dict[Kernel, Bits] = defaultdict(float)
    seconds: dict[Kernel, Bits] = defaultdict(float)
    for transfer in moved:
        kernel = (transfer.group, transfer.phase)
        nbytes[kernel] += transfer.total
        if not isinstance(transfer.group.operation, Gemm):
            values = float(transfer.values)
            flops[kernel] += values
            seconds[kernel] += values / hardware.vector_flops
    for matmul in listed:
        kernel = (matmul.group, "forward" if matmul.name == "forward" else "backward")
        done = float(FLOPS_PER_MAC * matmul.total_macs)
        flops[kernel] += done
        seconds[kernel] += done / _rate(matmul, hardware)
    totals = dict.fromkeys(CLASSES, ZERO)
    for kernel, size in nbytes.items():
        memory, compute = size / hardware.bandwidth, seconds[kernel]
        totals[kernel[0].operation.cls] += Floor(flops[kernel], size, compute, memory, np.maximum(memory, compute))
    return {cls: floor for cls, floor in totals.items() if np.any(floor.bytes)}


def _rate(matmul: MatMul, hardware: Hardware) -> Bits:
    """Operations a second of the fastest exact way to multiply the two widths."""

    def of(pair: int) -> float:
        m1, m2 = divmod(pair, WIDEST + 1)
        return hardware.rate(at_width(matmul.format, m1), at_width(matmul.format, m2)).flops

    return by_width(matmul.m1 * (WIDEST + 1) + matmul.m2, of)
