"""Roofline (Williams et al., 2009): intensity, ridge point, bound and time floor, per operation class and in total.

A kernel is one operation's forward, backward or update. Its floor is max(operations / peak, bytes / bandwidth):
matrix products run the fastest way their operands multiply exactly (Hardware.rate), fused attention at a share of that
rate, pointwise passes at the vector rate with one operation a value moved. On a card whose file states [step] it takes
the sum of both times (hardware.Efficiency), and on hardware that was measured what such a product or pass took. A
class's time is the sum over its kernels; it is memory-bound if half of it is of kernels whose bytes take longer than
their operations.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from dsq.costmodel.hardware.hardware import Hardware, Rate
from dsq.costmodel.model.ledger import FUSED, TIMED_AS, UPDATE
from dsq.costmodel.model.memory import saved_bytes
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.operations import CLASSES, Gemm, Group, Pointwise, Workload
from dsq.costmodel.model.traffic import (
    KINDS,
    CostedMatMul,
    Transfer,
    arithmetic_cost,
    matmuls,
    total_stash_bytes,
    transfers,
)
from dsq.formats import WIDEST, Identity

FLOPS_PER_MAC = 2
#: of a step: those of operations, and their update
STEP_CLASSES = (*CLASSES, "optimizer")
#: widest codes whose forward product has a kernel of its own; a backward with 16 bits at q3 is PyTorch's
CODED_FORWARD = 8
#: width of the floats that codes are multiplied as
COPY_BITS = 16


@dataclass(frozen=True)
class Floor:
    """Totals of a set of kernels."""

    flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float
    seconds: float  #: sum over kernels, as Efficiency puts the two together, or as was measured
    waiting_seconds: float  #: of these, those of kernels that wait for DRAM

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(*(value + vars(other)[name] for name, value in vars(self).items()))

    @property
    def intensity(self) -> float:
        """Operations a DRAM byte."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> float:
        """The intensity above which this mix of datatypes is compute-bound: its mean peak over the bandwidth."""
        return self.intensity * self.memory_seconds / self.compute_seconds

    @property
    def memory_bound(self) -> bool:
        return 2 * self.waiting_seconds >= self.seconds

    @property
    def flops_per_second(self) -> float:
        """Rate attained if every kernel runs at its floor."""
        return self.flops / self.seconds


ZERO = Floor(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def rates(products: list[CostedMatMul], cls: str, hardware: Hardware) -> dict[str, Rate]:
    """Return the ways in which the matrix products of a class run, by their names: "bf16", "2 x bf16"."""
    product_rates = [hardware.rate(matmul.first, matmul.second) for matmul in products if matmul.op.cls == cls]
    return {str(rate): rate for rate in product_rates}


def floors(moved: list[Transfer], products: list[CostedMatMul], hardware: Hardware, container: int) -> dict[str, Floor]:
    """Return the floor of each class of operations that has a kernel.

    Args:
        moved: of ``traffic_of``, all of it or a part.
        container: bits of what passes between operations.
    """
    Kernel = tuple[int, str]  # a group's id, which is quicker to look up than the group, and the phase
    groups: dict[int, Group] = {}
    nbytes: dict[Kernel, float] = defaultdict(float)
    flops: dict[Kernel, float] = defaultdict(float)
    seconds: dict[Kernel, float] = defaultdict(float)
    for transfer in moved:
        kernel, pointwise = (id(transfer.group), transfer.phase), not isinstance(transfer.group.operation, Gemm)
        groups[kernel[0]] = transfer.group
        nbytes[kernel] += transfer.bytes * (
            FUSED.get(transfer.group.operation.kind, 1) if hardware.efficiency.fused and pointwise else 1
        )
        flops[kernel] += float(transfer.values * pointwise)
        seconds[kernel] += transfer.values * pointwise / hardware.vector_flops
        if transfer.kind == "quantizing" and hardware.measured:  # a measured product's time has other bytes alone
            seconds[kernel] += hardware.moving(transfer.bytes)
    launches: dict[Kernel, int] = defaultdict(int)
    for matmul in products:
        kernel = (id(matmul.group), matmul.phase)
        launches[kernel] += matmul.op.weight or not matmul.op.on_chip  # a fused kernel makes all products of a pass
        flops[kernel] += float(FLOPS_PER_MAC * matmul.total_macs)
        seconds[kernel] += _product_seconds(matmul, hardware) + _around_product(matmul, hardware)
    totals = dict.fromkeys(STEP_CLASSES, ZERO)
    for kernel, size in nbytes.items():
        group, phase = groups[kernel[0]], kernel[1]
        memory, measured = hardware.moving(size), _measured_pass(group, phase, hardware, container)
        compute = seconds[kernel] if measured is None else measured
        duration = compute  # a measured product's time has its bytes'
        if measured is None and not (hardware.measured and isinstance(group.operation, Gemm)):
            work = max(memory, compute) if hardware.efficiency.overlaps else memory + compute
            duration = max(work, group.count * max(1, launches[kernel]) * hardware.efficiency.launch)
        totals["optimizer" if phase == UPDATE else group.operation.cls] += Floor(
            flops[kernel], size, compute, memory, duration, duration * (memory >= compute)
        )
    return {cls: floor for cls, floor in totals.items() if floor.bytes}


def step_floor(moved: list[Transfer], products: list[CostedMatMul], hardware: Hardware, container: int) -> Floor:
    """Return the floor of the whole step."""
    return sum(floors(moved, products, hardware, container).values(), start=ZERO)


def _measured_pass(group: Group, phase: str, hardware: Hardware, container: int) -> float | None:
    """Return the seconds of the group's passes as `calibrate` measured them; None: it did not, or the group is a
    product."""
    op = group.operation
    bits = WIDEST if op.container == "state" else container
    measured = hardware.passes.get((TIMED_AS.get(op.kind, op.kind), bits, phase))
    return group.count * measured.seconds(op.rows * op.width) if measured and isinstance(op, Pointwise) else None


def quantizing(products: list[CostedMatMul], hardware: Hardware, container: int) -> list[Transfer]:
    """Return the passes that quantize operands where units multiply floats: each reads both operands of a product and
    writes the floats that are multiplied. Codes that lie in DRAM are read as they are."""
    value_bits = container + COPY_BITS
    return [
        Transfer(
            group=matmul.group,
            tensor=f"operands of {matmul.name}",
            kind="quantizing",
            phase=matmul.phase,
            direction="read",
            bytes=matmul.group.count * matmul.operand_values * value_bits // 8,
            values=0,
        )
        for matmul in products
        if not isinstance(matmul.first, Identity)
        and not (hardware.efficiency.overlaps or hardware.word)
        and hardware.rate(matmul.first, matmul.second).peak.multiplies_floats
    ]


def traffic_of(workload: Workload, setup: Setup, hardware: Hardware, buffer: float = 0) -> list[Transfer]:
    """Return every tensor that a step moves on the hardware: as ``transfers``, and to quantize operands; buffer: 0:
    the hardware's."""
    passes = quantizing(matmuls(workload, setup), hardware, setup.container_bits)
    return transfers(workload, setup, buffer or hardware.sram, hardware.word) + passes


def _around_product(matmul: CostedMatMul, hardware: Hardware) -> float:
    """Return the seconds that were measured around a product: its bias's gradient sums dy, and a converted layer's
    weight that is stored (in, out) is turned over for kernels that take no codes, and so is its gradient."""
    op, seconds = matmul.op, 0.0
    summed, transposing = (hardware.passes.get((kind, WIDEST, "forward")) for kind in ("column sum", "turned"))
    if summed and op.bias and matmul.name == "dw":
        seconds = summed.seconds(op.M * op.N)
    if isinstance(matmul.first, Identity):
        return matmul.group.count * seconds
    if transposing and op.transposed and matmul.first.bits > (CODED_FORWARD if matmul.name == "forward" else 0):
        seconds += transposing.seconds(op.K * op.N)
    return matmul.group.count * seconds


def _product_seconds(matmul: CostedMatMul, hardware: Hardware) -> float:
    """Return the time of the group's products, run the fastest exact way for the two widths."""
    op, count, rate = matmul.op, matmul.group.count, hardware.rate(matmul.first, matmul.second)
    fused = op.on_chip and not op.weight
    if fused and rate.peak.attention:
        values = op.K * op.N + op.M * (op.K if op.on_chip == "y" else op.N)  # but for the scores
        flops, whole = FLOPS_PER_MAC * op.macs, FLOPS_PER_MAC * replace(op, pairs=0).macs
        return count * rate.peak.attention.seconds(flops, whole, op.batch * values)
    share = hardware.attention if fused else hardware.efficiency.experts if op.weights > 1 else 1
    return rate.seconds(FLOPS_PER_MAC * matmul.total_macs / share, matmul.values * count, count)


def widened_seconds(products: list[CostedMatMul], hardware: Hardware) -> float:
    """Return the seconds of unquantized products whose floats run in a wider unit, as none of their width is faster."""
    ways = ((matmul, hardware.rate(matmul.first, matmul.second)) for matmul in products)
    return sum(
        _product_seconds(matmul, hardware)
        for matmul, rate in ways
        if isinstance(matmul.first, Identity) and matmul.first.bits < rate.peak.holds[Identity.name][0]
    )


@dataclass(frozen=True)
class Estimate:
    """Costs of one training step."""

    traffic: dict[str, int]  #: bytes moved, by traffic.KINDS
    stash_bytes: int  #: held by converted layers between forward and backward
    saved_bytes: float  #: held by the whole model, converted layers included
    arithmetic: float  #: in fixed-point 32 x 32 multiply-accumulates
    joules: float | None  #: see step_joules
    classes: dict[str, Floor]

    @property
    def dram_bytes(self) -> int:
        return sum(self.traffic.values())

    @property
    def total(self) -> Floor:
        return sum(self.classes.values(), start=ZERO)


def evaluate(workload: Workload, setup: Setup, hardware: Hardware, buffer: float = 0) -> Estimate:
    """Return the cost of one training step. Raises ValueError if the hardware lacks a datatype, or the buffer is too
    small."""
    multiplied, moved = matmuls(workload, setup), traffic_of(workload, setup, hardware, buffer)
    kinds = KINDS if buffer or hardware.sram else KINDS[:-1]
    return Estimate(
        traffic={kind: sum(transfer.bytes for transfer in moved if transfer.kind == kind) for kind in kinds},
        stash_bytes=total_stash_bytes(workload, setup),
        saved_bytes=saved_bytes(workload, setup),
        arithmetic=arithmetic_cost(multiplied),
        joules=step_joules(moved, multiplied, hardware),
        classes=floors(moved, multiplied, hardware, setup.container_bits),
    )


def step_joules(moved: list[Transfer], products: list[CostedMatMul], hardware: Hardware) -> float | None:
    """Return the energy of a step: DRAM bytes, each in the buffer once in and once out, and multiply-accumulates of all
    passes. None where the hardware states no energy of a unit that runs."""
    energy = hardware.energy
    runs = [(hardware.rate(matmul.first, matmul.second), matmul.total_macs) for matmul in products]
    if not energy or any(rate.peak.datatype not in energy.macs for rate, _ in runs):
        return None
    multiplied = sum(rate.passes * macs * energy.macs[rate.peak.datatype] for rate, macs in runs)
    return multiplied + sum(transfer.bytes for transfer in moved) * (energy.dram + 2 * energy.sram)
