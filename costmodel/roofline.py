"""Roofline (Williams et al., 2009): intensity, ridge point, bound and time floor, per operation class and in total.

A kernel is one operation's forward, backward or update. Its floor is max(operations / peak, bytes / bandwidth):
products run at the fastest datatype that multiplies their operands exactly, pointwise passes at the vector rate with
one operation a value moved. A class's floor is the sum over its kernels; it is memory-bound if its bytes alone take
longer than its operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.arithmetic import Product
from costmodel.formats import Bits
from costmodel.hardware import Hardware
from costmodel.operations import CLASSES, Gemm, Group
from costmodel.traffic import Charge

FLOPS_PER_MAC = 2


@dataclass(frozen=True)
class Floor:
    """Totals of a set of kernels; every field may be an array with one entry a configuration."""

    flops: Bits
    bytes: Bits
    compute_seconds: Bits
    memory_seconds: Bits
    seconds: Bits  #: sum over kernels of the larger of the two

    def __add__(self, other: Floor) -> Floor:
        return Floor(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.compute_seconds + other.compute_seconds,
            self.memory_seconds + other.memory_seconds,
            self.seconds + other.seconds,
        )

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


def datatypes(products: list[Product], cls: str, hardware: Hardware) -> str:
    """The datatypes that the class's matrix products run at, for one configuration: "bf16", "bf16, fp32" or ""."""
    used = {
        hardware.datatype(product.kind, int(np.maximum(product.m1, product.m2))).datatype
        for product in products
        if product.group.operation.cls == cls
    }
    return ", ".join(sorted(used))


ZERO = Floor(0.0, 0.0, 0.0, 0.0, 0.0)


def floors(charges: list[Charge], products: list[Product], hardware: Hardware) -> dict[str, Floor]:
    """Floor of each operation class that has a kernel."""
    Kernel = tuple[Group, str]
    nbytes: dict[Kernel, Bits] = {}
    flops: dict[Kernel, Bits] = {}
    seconds: dict[Kernel, Bits] = {}
    for charge in charges:
        kernel = (charge.group, charge.phase)
        nbytes[kernel] = nbytes.get(kernel, 0.0) + charge.total
        if not isinstance(charge.group.operation, Gemm):
            moved = (
                float(charge.total) * 8 / charge.bits if np.ndim(charge.total) == 0 else charge.total * 8 / charge.bits
            )
            flops[kernel] = flops.get(kernel, 0.0) + moved
            seconds[kernel] = seconds.get(kernel, 0.0) + moved / hardware.vector_flops
    for product in products:
        kernel = (product.group, "forward" if product.name == "forward" else "backward")
        done = float(FLOPS_PER_MAC * product.total)
        rate = hardware.matrix_flops(product.kind, np.maximum(product.m1, product.m2))
        flops[kernel] = flops.get(kernel, 0.0) + done
        seconds[kernel] = seconds.get(kernel, 0.0) + done / rate
    found = dict.fromkeys(CLASSES, ZERO)
    for kernel, moved in nbytes.items():
        memory, compute = moved / hardware.bandwidth, seconds.get(kernel, 0.0)
        found[kernel[0].operation.cls] += Floor(
            flops.get(kernel, 0.0), moved, compute, memory, np.maximum(memory, compute)
        )
    return {cls: floor for cls, floor in found.items() if np.any(floor.bytes)}
