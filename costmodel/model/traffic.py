"""The bytes that a training step moves between DRAM and the chip, and the products that it multiplies.

The ledger's tensors move, each written once and read once by each of its readers.

Master weights, their gradients and Adam's moments have 32 bits, the working copy of the weights has the container
width. Elementwise passes are not fused with their neighbors.

A training step multiplies, in each linear layer, q0 x q0 (forward), q2 x q1
(dx = Q2(dy) Q1(w), where w has at least `min_weight_bits`) and
q3 x q1 (dw = Q3(dy)^T Q1(x)); of attention's products, where they are quantized, both gradients take Q2(dy). Matrix
products no quantizer touches multiply containers of width a as floating point.
"""

from dataclasses import dataclass, replace
from math import prod

from dsq.costmodel.model import ledger
from dsq.costmodel.model.ledger import BACKWARD, BEFORE, FOR_GRADIENT, STATE_BITS, UPDATE, Stored
from dsq.costmodel.model.methods import Setup, at_width
from dsq.costmodel.model.operations import Gemm, Group, Pointwise, Workload
from dsq.formats import MAX_PACKED_BITS, WIDEST, Format, Identity, Layout

#: the operand of Gemm.on_chip -> its shape
_ON_CHIP = {"x": "MK", "y": "MN", "": ""}


@dataclass(frozen=True)
class Transfer:
    """One named tensor's traffic, of all operations of a group of alike ones."""

    group: Group
    tensor: str
    phase: str
    direction: str  #: "read" or "write"
    bytes: int
    values: int


def transfers(workload: Workload, setup: Setup) -> list[Transfer]:
    """Every tensor moved in one training step."""
    widths = widths_of(setup)
    pairs = ((group, stored) for group in workload.groups for stored in tensors_of(group, setup))
    return [moved for group, stored in pairs for moved in _moves(group, stored, setup, widths)]


def widths_of(setup: Setup) -> dict[str, int]:
    """int of each width a stored tensor may have."""
    container = setup.container_bits
    widths = {f"q{i}": bits for i, bits in enumerate(setup.precision)}
    widths["cast"] = STATE_BITS if container < STATE_BITS else 0
    widths["narrow"] = container if container < STATE_BITS and not setup.autocast else 0
    widths["r"] = WIDEST if setup.autocast else container
    always = {"state": STATE_BITS, "ids": ledger.ID_BITS, "mask": ledger.MASK_BITS}
    return widths | always | {"a": container, "w": container}


def tensors_of(group: Group, setup: Setup) -> list[Stored]:
    """The tensors that one operation of the group stores: those its gradients need, not on chip."""
    op = group.operation
    if isinstance(op, Pointwise):
        listed, on_chip = ledger.POINTWISE[op.kind], ""
        if setup.autocast:  # which computes softmax in fp32
            op = replace(op, upcasts=True)
    else:
        listed, on_chip = ledger.of_gemm(op, packs=not isinstance(setup.format, Identity)), _ON_CHIP[op.on_chip]
        if setup.autocast and op.weight:
            listed = ledger.under_autocast(op, listed)
    listed = ledger.of_width(op.container, listed) if op.container else listed
    listed = listed if op.backward else ledger.forward_alone(listed)
    return [stored for stored in listed if stored.shape != on_chip and (not stored.needs or getattr(op, stored.needs))]


def layout_bytes(group: Group, stored: Stored, setup: Setup, widths: dict[str, int]) -> int:
    """Bytes of one such tensor."""
    outer, rows, columns = _shape(group, stored)
    bits = widths[stored.width]
    if not stored.width.startswith("q"):
        return outer * rows * columns * bits // 8
    return at_width(setup.format, bits).nbytes(Layout(outer, rows, columns, along_rows=True))


def stash_bytes(gemm: Gemm, setup: Setup) -> int:
    """Bytes that a converted layer keeps of its input for the backward; of floats the input itself."""
    if isinstance(setup.format, Identity):
        return gemm.batch * gemm.M * gemm.K * setup.container_bits // 8
    fmt = setup.operands["x_for_dw"] if setup.operands else at_width(setup.format, setup.precision.q1)
    return fmt.nbytes(Layout(gemm.batch, gemm.M, gemm.K, along_rows=True))


def total_stash_bytes(workload: Workload, setup: Setup) -> int:
    """Bytes stashed by all converted linear layers together; a shared input counts once."""
    total = 0
    for group in workload.groups:
        op = group.operation
        if isinstance(op, Gemm) and op.quantized and op.weight and op.w_grad and group.owner:
            total += group.count * stash_bytes(op, setup)
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


def _moves(group: Group, stored: Stored, setup: Setup, widths: dict[str, int]) -> list[Transfer]:
    op = group.operation
    count, bits = group.count * stored.times, widths[stored.width]
    size, values = count * layout_bytes(group, stored, setup, widths), count * prod(_shape(group, stored))
    moved = []
    if stored.own and (stored.written != UPDATE or op.kind == "adam"):  # which writes the parameters of the others
        there = True
        if stored.width.startswith("q"):  # above 16 bits dsq keeps x itself, and a shared input is stashed once
            there = bits <= MAX_PACKED_BITS and (group.owner or stored.name != "stash")
        elif stored.width == "w":  # where the container has 32 bits, the master weights serve
            there = bits < WIDEST
        if there:
            moved.append(Transfer(group, stored.name, stored.written, "write", size, values))
    for read in stored.reads:
        gradient = FOR_GRADIENT.get(read)
        if not gradient or getattr(op, gradient):
            name, phase = (f"{stored.name} (for {read})", BACKWARD) if gradient else (stored.name, read)
            moved.append(Transfer(group, name, phase, "read", size, values))
    return moved


# ---- what it multiplies


@dataclass(frozen=True)
class CostedMatMul:
    """One matrix product of a group of operations, and the formats of its operands."""

    group: Group
    op: Gemm  #: the group's operation
    name: str  #: "forward", "dx", "dw" or "recompute"
    first: Format
    second: Format

    @property
    def total_macs(self) -> int:
        return self.op.macs * self.group.count

    @property
    def values(self) -> int:
        """Values in the operands and the result of one operation of the group."""
        op = self.op
        return op.batch * (op.M * op.K + op.weights * op.N * op.K + op.M * op.N)

    @property
    def operand_values(self) -> int:
        """Values in the two operands of one operation of the group."""
        op = self.op
        x, w, y = op.M * op.K, op.weights * op.N * op.K, op.M * op.N
        return op.batch * {"dx": y + w, "dw": y + x}.get(self.name, x + w)


def matmuls(workload: Workload, setup: Setup) -> list[CostedMatMul]:
    """Every matrix product of one training step."""
    q, container = setup.precision, setup.container_bits
    listed = []
    for group in workload.groups:
        op = group.operation
        if not isinstance(op, Gemm):
            continue
        w = max(q.q1, min(q.q0, setup.min_weight_bits)) if op.weight else q.q1
        pairs = [("forward", q.q0, q.q0)]
        pairs += [("dx", q.q2, w)] if op.x_grad else []
        pairs += [("dw", q.q3 if op.weight else q.q2, q.q1)] if op.w_grad else []
        pairs += [("recompute", q.q0, q.q0)] * op.recompute
        for name, m1, m2 in pairs:
            floats = WIDEST if op.container else container
            if op.quantized and setup.operands:
                first, second = (setup.operands[operand] for operand in _OPERANDS[name])
            else:
                fmt, *widths = (setup.format, m1, m2) if op.quantized else (Identity(), floats, floats)
                first, second = (at_width(fmt, bits) for bits in widths)
            listed.append(CostedMatMul(group, op, name, first, second))
    return listed


#: operands of each product, as a level that names formats has them
_OPERANDS = {"forward": ("x", "w"), "dx": ("dy_for_dx", "w_for_dx"), "dw": ("dy_for_dw", "x_for_dw")}
_OPERANDS["recompute"] = _OPERANDS["forward"]


#: K and p of a multiply-accumulate's cost, K (m1 m2)^p: of an array multiplier, which has one cell for each pair of
#: operand bits (the paper's table 1: 16 x 16 bits cost 0.25 of 32 x 32)
ARRAY = 1 / 32**2, 1.0
#: the same of formats with blocks: table 1's BFP [32,32,32,32] 0.56 x and [16,16,16,16] 0.18 x, with
#: p = ln(0.56 / 0.18) / ln 4 to two digits
BLOCKS = 0.56 / 32 ** (2 * 0.82), 0.82


def mac_cost(first: Format, second: Format) -> float:
    """Return the cost of a multiply-accumulate in fixed-point 32 x 32 ones. A multiplier sees all of a code, and the
    significand of a float."""
    factor, power = BLOCKS if first.block_size else ARRAY
    return float(factor * (first.multiplier_bits * second.multiplier_bits) ** power)


def arithmetic_cost(listed: list[CostedMatMul]) -> float:
    """Return the cost of the matrix products in fixed-point 32 x 32 multiply-accumulates."""
    return sum((product.total_macs * mac_cost(product.first, product.second) for product in listed), start=0.0)
