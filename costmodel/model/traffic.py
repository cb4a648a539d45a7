"""Every byte a training step moves between DRAM and the chip: the ledger's tensors, each written once and read by each
of its readers as often as the tile model says.

The container width `a` is 16 bits when all of q0..q3 fit, else 32; master weights, their gradients and Adam's moments
have 32, and the working copy of the weights that products read has `a`. Elementwise passes are not fused with their
neighbours.

Cache reuse is a stated model, output-stationary square tiles. Half the on-chip memory S (bytes) holds a t x t tile of
fp32 sums, the other half streams the operands, so t = floor(sqrt(S / 8)). Each row of tiles streams the second operand
once, each column of tiles the first. Widths play no part: sums are fp32 in every precision.
"""

import math
from dataclasses import dataclass
from math import prod

from costmodel.model.ledger import (
    BEFORE,
    ID_BITS,
    MASK_BITS,
    POINTWISE,
    STATE_BITS,
    UPDATE,
    Stored,
    forward_alone,
    of_gemm,
    under_autocast,
)
from costmodel.model.operations import Gemm, Group, Pointwise, Workload
from costmodel.model.quantisation import Setup, at_width
from dsq.formats import MAX_PACKED_BITS, WIDEST, Identity

ACCUMULATOR_BYTES = 4
#: the operand of Gemm.on_chip -> its shape
_ON_CHIP = {"x": "MK", "y": "MN", "": ""}


def tile_edge(on_chip_bytes: float) -> int:
    """t = floor(sqrt(S / 2 / 4)), at least 1. An infinite S reads each operand once."""
    return 2**62 if math.isinf(on_chip_bytes) else max(1, math.isqrt(int(on_chip_bytes) // (2 * ACCUMULATOR_BYTES)))


def reads(other_dimension: int, edge: int) -> int:
    """How often an operand is read: once for every tile along the output dimension it does not have."""
    return -(-other_dimension // edge)


@dataclass(frozen=True)
class Transfer:
    """One named tensor's traffic, of each operation of a group of alike ones."""

    group: Group
    tensor: str
    phase: str
    direction: str  #: "read" or "write"
    bits: int
    times: int  #: how often it moves
    bytes: int  #: of all its times
    elements: int  #: of the tensor

    @property
    def total(self) -> int:
        """Bytes of the whole group."""
        return self.bytes * self.group.count

    @property
    def values(self) -> int:
        """Values moved by the whole group."""
        return self.times * self.elements * self.group.count


def transfers(workload: Workload, setup: Setup, on_chip_bytes: float) -> list[Transfer]:
    """Every tensor moved in one training step."""
    edge, widths = tile_edge(on_chip_bytes), widths_of(setup)
    listed: list[Transfer] = []
    for group in workload.groups:
        for stored in tensors_of(group, setup):
            listed += _moves(group, stored, setup, widths, edge)
    return listed


def widths_of(setup: Setup) -> dict[str, int]:
    """int of each width a stored tensor may have."""
    container = setup.container_bits
    widths = {f"q{i}": bits for i, bits in enumerate(setup.precision)}
    widths["cast"] = STATE_BITS if container < STATE_BITS else 0
    widths["narrow"] = container if container < STATE_BITS and not setup.autocast else 0
    widths["r"] = WIDEST if setup.autocast else container
    return widths | {"a": container, "w": container, "state": STATE_BITS, "ids": ID_BITS, "mask": MASK_BITS}


def tensors_of(group: Group, setup: Setup) -> list[Stored]:
    """The tensors that one operation of the group stores: those that its gradients need and its kernel does not keep
    on chip."""
    op = group.operation
    if isinstance(op, Pointwise):
        listed, on_chip = POINTWISE[op.kind], ""
    else:
        listed, on_chip = of_gemm(op, packs=not isinstance(setup.format, Identity)), _ON_CHIP[op.on_chip]
        if setup.autocast and op.weight:
            listed = under_autocast(op, listed)
    listed = listed if op.backward else forward_alone(listed)
    return [stored for stored in listed if stored.shape != on_chip and (not stored.needs or getattr(op, stored.needs))]


def layout_bytes(group: Group, stored: Stored, setup: Setup, widths: dict[str, int]) -> int:
    """Bytes of one such tensor."""
    outer, rows, columns = _shape(group, stored)
    bits = widths[stored.width]
    if not stored.width.startswith("q"):
        return outer * rows * columns * bits // 8
    return at_width(setup.format, bits).nbytes(setup.layout(outer, rows, columns, stored.boxes))


def stash_bytes(gemm: Gemm, setup: Setup) -> int:
    """Bytes dsq keeps of x between forward and backward for one converted layer that owns its input; of floats x
    itself."""
    if isinstance(setup.format, Identity):
        return gemm.batch * gemm.M * gemm.K * setup.container_bits // 8
    return at_width(setup.format, setup.precision.q1).nbytes(setup.layout(gemm.batch, gemm.M, gemm.K, "rows"))


def total_stash_bytes(workload: Workload, setup: Setup) -> int:
    """Bytes stashed by all converted linear layers together; a shared input counts once."""
    total = 0
    for group in workload.groups:
        op = group.operation
        if isinstance(op, Gemm) and op.quantised and op.weight and op.w_grad and group.owner:
            total = total + group.count * stash_bytes(op, setup)
    return total


def _shape(group: Group, stored: Stored) -> tuple[int, int, int]:
    """(outer, rows, columns)."""
    op = group.operation
    if isinstance(op, Gemm):
        size = {"M": op.M, "K": op.K, "N": op.N}
        if "N" in stored.shape and "M" not in stored.shape:  # a weight or bias: one for each expert
            rows = size[stored.shape[0]] if len(stored.shape) > 1 else 1
            return op.batch * op.weights, rows, size[stored.shape[-1]]
        if len(stored.shape) == 1:
            return op.batch, 1, size[stored.shape]
        if stored.shape == "MK" and op.x_values and stored.name == "x":
            values = op.x_values if stored.written == BEFORE else min(op.x_values, op.M * op.K)
            return 1, -(-values // op.K), op.K
        return op.batch, size[stored.shape[0]], size[stored.shape[1]]
    return (1, op.rows, op.width) if stored.shape == "values" else (1, getattr(op, stored.shape), 1)


def _moves(group: Group, stored: Stored, setup: Setup, widths: dict[str, int], edge: int) -> list[Transfer]:
    op = group.operation
    size, bits, elements = layout_bytes(group, stored, setup, widths), widths[stored.width], prod(_shape(group, stored))
    moved = []

    def move(name: str, phase: str, direction: str, times: int) -> None:
        moved.append(Transfer(group, name, phase, direction, bits, times, size * times, elements))

    if stored.own and not (stored.written == UPDATE and isinstance(op, Gemm)) and not _parameter(stored, op):
        there = True
        if stored.width.startswith("q"):  # above 16 bits dsq keeps x itself, and a shared input is stashed once
            there = bits <= MAX_PACKED_BITS and (group.owner or stored.name != "stash")
        elif stored.width == "w":  # where the container has 32 bits, the master weights serve
            there = bits < WIDEST
        if there:
            move(stored.name, stored.written, "write", stored.times)
    for read in stored.reads:
        if read.needs and not getattr(op, read.needs):
            continue
        times = stored.times
        if read.reread and isinstance(op, Gemm):
            times *= reads({"M": -(-op.M // op.weights), "K": op.K, "N": op.N}[read.reread], edge)
        move(read.name or stored.name, read.phase, "read", times)
    return moved


def _parameter(stored: Stored, op: object) -> bool:
    """A parameter, which the optimiser writes for the operation that reads it."""
    return stored.written == UPDATE and isinstance(op, Pointwise) and op.kind != "adam"
