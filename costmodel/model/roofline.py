"""Roofline (Williams et al., 2009): intensity, ridge point, bound and time floor, per operation class and in total.

A kernel is one operation's forward, backward or update. Its floor is max(operations / peak, bytes / bandwidth):
matrix products run the fastest way their operands multiply exactly (Hardware.rate), fused attention at a share of that
rate, pointwise passes at the vector rate with one operation a value moved. In a real step a kernel takes longer: it
reaches a share of the bandwidth, computes little while it moves, and is no shorter than a launch
(hardware/efficiency.py; not with --datasheet). On hardware that was measured, it takes what such a product or pass was
measured to take, its memory included. A class's time is the sum over its kernels; it is memory-bound if its bytes alone
take longer than its operations.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodel.hardware.hardware import Hardware, Rate
from costmodel.model.arithmetic import CostedMatMul
from costmodel.model.operations import CLASSES, Gemm, Group, Pointwise
from costmodel.model.quantisation import Bits, at_width, by_width
from costmodel.model.traffic import Transfer
from dsq.formats import WIDEST, Identity

FLOPS_PER_MAC = 2
#: widest codes whose forward product has a kernel of its own; a backward with 16 bits at q3 is PyTorch's
CODED_FORWARD = 8
#: passes that take what another kind was measured to take
TIMED_AS = {"bias": "scale", "split": "heads", "late rms": "rms", "loss of fp32": "loss"}
TIMED_AS |= {"position bias": "embedding"} | dict.fromkeys(("mask", "zero bias", "fused zero bias"), "scale")
TIMED_AS |= {"expert gate": "gate", "expert weights": "activation"}


@dataclass(frozen=True)
class Floor:
    """Totals of a set of kernels; every field may be an array with one entry a configuration."""

    flops: Bits
    bytes: Bits
    compute_seconds: Bits
    memory_seconds: Bits
    seconds: Bits  #: sum over kernels, as Efficiency puts the two together, or as was measured

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(*(mine + vars(other)[name] for name, mine in vars(self).items()))

    def __truediv__(self, devices: int) -> "Floor":
        """Of each of the devices that share it."""
        return Floor(*(whole / devices for whole in vars(self).values()))

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


def operation_class(group: Group) -> str:
    return group.operation.cls


def operation_kind(group: Group) -> str:
    """What the operation is called in every layer: "fc1", "softmax"."""
    return group.names[0].rpartition(".")[2] if isinstance(group.operation, Gemm) else group.operation.kind


def rates(
    listed: list[CostedMatMul], name: str, hardware: Hardware, key: Callable[[Group], str] = operation_class
) -> list[Rate]:
    """How the matrix products of a class run, for one configuration: each way once."""
    used = [
        hardware.rate(at_width(matmul.format, matmul.m1), at_width(matmul.format, matmul.m2))
        for matmul in listed
        if key(matmul.group) == name
    ]
    return list({str(rate): rate for rate in used}.values())


def datatypes(
    listed: list[CostedMatMul], name: str, hardware: Hardware, key: Callable[[Group], str] = operation_class
) -> str:
    """The same in words: "bf16", "2 x bf16, bf16" or ""."""
    return ", ".join(sorted(map(str, rates(listed, name, hardware, key))))


def floors(
    moved: list[Transfer],
    listed: list[CostedMatMul],
    hardware: Hardware,
    container: Bits,
    key: Callable[[Group], str] = operation_class,
) -> dict[str, Floor]:
    """Floor of each class of operations that has a kernel; `container`: bits of what passes between operations."""
    Kernel = tuple[int, str]  # a group's id, which is quicker to look up than the group, and the phase
    groups: dict[int, Group] = {}
    nbytes: dict[Kernel, Bits] = defaultdict(float)
    flops: dict[Kernel, Bits] = defaultdict(float)
    seconds: dict[Kernel, Bits] = defaultdict(float)
    for transfer in moved:
        kernel = (id(transfer.group), transfer.phase)
        groups[kernel[0]] = transfer.group
        nbytes[kernel] += transfer.total
        if not isinstance(transfer.group.operation, Gemm):
            values = float(transfer.values)
            flops[kernel] += values
            seconds[kernel] += values / hardware.vector_flops
    launches: dict[Kernel, int] = defaultdict(int)
    for matmul in listed:
        kernel = (id(matmul.group), "forward" if matmul.name == "forward" else "backward")
        launches[kernel] += not matmul.group.operation.on_chip  # a fused kernel makes all products of a pass
        flops[kernel] += float(FLOPS_PER_MAC * matmul.total_macs)
        seconds[kernel] += _product_seconds(matmul, hardware) + _beside(matmul, hardware)
    totals: dict[str, Floor] = dict.fromkeys(CLASSES if key is operation_class else (), ZERO)
    for kernel, size in nbytes.items():
        group, phase = groups[kernel[0]], kernel[1]
        reached = hardware.efficiency
        memory, compute = size / (hardware.bandwidth * reached.memory), seconds[kernel]
        measured = bool(hardware.measured)
        if isinstance(group.operation, Pointwise):
            measured = _is_measured(group.operation, phase, hardware, container)
            compute = _pass_seconds(group, phase, hardware, container) if measured else compute
        both = np.maximum(memory, compute) + reached.serial * np.minimum(memory, compute)
        launched = group.count * max(1, launches[kernel]) * reached.launch
        longest = compute if measured else np.maximum(both, launched)
        name = key(group)
        totals[name] = totals.get(name, ZERO) + Floor(flops[kernel], size, compute, memory, longest)
    return {cls: floor for cls, floor in totals.items() if np.any(floor.bytes)}


def step_floor(moved: list[Transfer], listed: list[CostedMatMul], hardware: Hardware, container: Bits) -> Floor:
    """That of the whole step."""
    return sum(floors(moved, listed, hardware, container).values(), start=ZERO)


def _is_measured(op: Pointwise, phase: str, hardware: Hardware, container: Bits) -> bool:
    kind = TIMED_AS.get(op.kind, op.kind)
    return bool(np.all(by_width(container, lambda bits: (kind, bits, phase) in hardware.passes)))


def _pass_seconds(group: Group, phase: str, hardware: Hardware, container: Bits) -> Bits:
    op = group.operation
    assert isinstance(op, Pointwise)

    def of(bits: int) -> float:
        found = hardware.passes[TIMED_AS.get(op.kind, op.kind), bits, phase]
        return group.count * found.seconds(op.rows * op.width)

    return by_width(container, of)


def _beside(matmul: CostedMatMul, hardware: Hardware) -> Bits:
    """Time of what a layer does beside a product, where that was measured: its bias's gradient sums dy. A converted
    layer's weight that is stored (in, out) is turned over for kernels that take no codes, and so is its gradient."""
    op = matmul.group.operation
    assert isinstance(op, Gemm)
    found: Bits = 0.0
    summed, turned = (hardware.passes.get((kind, WIDEST, "forward")) for kind in ("column sum", "turned"))
    if summed and op.bias and matmul.name == "dw":
        found = summed.seconds(op.M * op.N)
    if turned and op.transposed and not isinstance(matmul.format, Identity):
        narrow = CODED_FORWARD if matmul.name == "forward" else 0
        found = found + by_width(matmul.m1, lambda m: m > narrow) * turned.seconds(op.K * op.N)
    return matmul.group.count * found


def _product_seconds(matmul: CostedMatMul, hardware: Hardware) -> Bits:
    """Time of the group's products, run the fastest exact way for the two widths."""
    op, count = matmul.group.operation, matmul.group.count
    assert isinstance(op, Gemm)
    share = hardware.attention if op.on_chip else 1
    flops, values = float(FLOPS_PER_MAC * matmul.total_macs) / share, float(matmul.values * count)

    def of(pair: int) -> float:
        m1, m2 = divmod(pair, WIDEST + 1)
        rate = hardware.rate(at_width(matmul.format, m1), at_width(matmul.format, m2))
        return rate.seconds(flops, values, count)

    return by_width(matmul.m1 * (WIDEST + 1) + matmul.m2, of)
