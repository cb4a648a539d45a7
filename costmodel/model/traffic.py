"""The bytes that a training step moves between DRAM and the chip, and the products that it multiplies.

The ledger's tensors move, each written once and read once by each of its readers: in containers, or those of a
converted product at their own bits (OPERAND_OF), as the paper counts them.

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
from dsq.costmodel.model.ledger import AFTER, BACKWARD, BEFORE, FOR_GRADIENT, FORWARD, STATE_BITS, UPDATE, Stored
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.operations import Gemm, Group, Operation, Pointwise, Workload
from dsq.costmodel.model.tiles import TiledProduct, bytes_again
from dsq.formats import WIDEST, Format, Identity, Layout

#: a converted product's tensor, as it is moved -> the operand at whose bits it lies in DRAM: y is the next layer's x
OPERAND_OF = {
    **{"x": "x", "y": "x", "w": "w", "dx": "dx", "dw": "dx"},  # a dw in containers is of activations
    **{"x (for dw)": "x_for_dw", "stash": "x_for_dw", "w (for dx)": "w_for_dx", "stash of w": "w_for_dx"},
    **{"dy (for dx)": "dy_for_dx", "dy (for dw)": "dy_for_dw"},
}
#: the operand of Gemm.on_chip -> its shape
_ON_CHIP = {"x": "MK", "y": "MN", "": ""}
#: the purposes of traffic, in the order of tables
KINDS = (
    *("weights", "activations written", "activations read", "stash written", "stash read", "gradients", "optimizer"),
    "quantizing",  # what is read and written to quantize operands for units that multiply floats
    "again",  # what tiles in a finite buffer fetch again or spill
)


@dataclass(frozen=True)
class Transfer:
    """One named tensor's traffic, of all operations of a group of alike ones."""

    group: Group
    tensor: str
    kind: str  #: one of KINDS
    phase: str
    direction: str  #: "read" or "write"
    bytes: int
    values: int


def transfers(workload: Workload, setup: Setup, buffer: float = 0, word: int = 0) -> list[Transfer]:
    """Return every tensor moved in one training step.

    Args:
        buffer: bytes on chip: what tiles fetch again moves too; 0: each tensor moves once.
        word: bits of the words of DRAM in which converted products' tensors lie at their own bits; 0: they lie in
            containers, a packed stash at q1.
    Raises:
        ValueError: a buffer that holds no tile.
    """
    widths = widths_of(setup)
    pairs = ((group, stored) for group in workload.groups for stored in tensors_of(group, setup))
    once = [moved for group, stored in pairs for moved in _moves(group, stored, setup, widths, word)]
    return once + [_moved_again(matmul, setup, buffer, word) for matmul in matmuls(workload, setup) if buffer]


def widths_of(setup: Setup) -> dict[str, int]:
    """Return the bits of each width that a stored tensor may have; a stash (q1) has its scales besides."""
    container = setup.container_bits
    is_narrow = container < STATE_BITS
    return {
        "q1": setup.stash.bits,
        "a": container,
        "w": container,
        "r": WIDEST if setup.autocast else container,
        "state": STATE_BITS,
        "ids": ledger.ID_BITS,
        "mask": ledger.MASK_BITS,
        "cast": STATE_BITS if is_narrow else 0,
        "narrow": container if is_narrow and not setup.autocast else 0,
    }


def tensors_of(group: Group, setup: Setup) -> list[Stored]:
    """Return the tensors that one operation of the group stores: those its gradients need, not on chip."""
    op = group.operation
    if isinstance(op, Pointwise):
        tensors, on_chip = ledger.POINTWISE[op.kind], ""
        if setup.autocast:  # which computes softmax in fp32
            op = replace(op, upcasts=True)
    else:
        tensors, on_chip = ledger.of_gemm(op, packs=setup.stash.packs), _ON_CHIP[op.on_chip]
        if setup.autocast and op.weight:
            tensors = ledger.under_autocast(op, tensors)
    tensors = ledger.of_width(op.container, tensors) if op.container else tensors
    tensors = tensors if op.backward else ledger.forward_alone(tensors)
    return [stored for stored in tensors if stored.shape != on_chip and (not stored.needs or getattr(op, stored.needs))]


def layout_bytes(group: Group, stored: Stored, setup: Setup, widths: dict[str, int]) -> int:
    """Return the bytes of one such tensor."""
    shape = shape_of(group, stored)
    if stored.width == "q1":
        return setup.stash.nbytes(Layout(*shape, along_rows=True))
    return prod(shape) * widths[stored.width] // 8


def total_stash_bytes(workload: Workload, setup: Setup) -> int:
    """Return the bytes that all converted linear layers save of their inputs; a shared input counts once. Of floats the
    input itself."""
    widths = widths_of(setup)
    owners = (
        group
        for group in workload.groups
        if isinstance(op := group.operation, Gemm) and op.quantized and op.trains and group.owner
    )
    return sum(
        group.count * layout_bytes(group, stored, setup, widths)
        for group in owners
        for stored in tensors_of(group, setup)
        if stored.saved and stored.name in ("stash", "x")
    )


def shape_of(group: Group, stored: Stored) -> tuple[int, int, int]:
    """Return (outer, rows, columns)."""
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


def _moves(group: Group, stored: Stored, setup: Setup, widths: dict[str, int], word: int) -> list[Transfer]:
    op = group.operation
    count = group.count * stored.times
    size, values = count * layout_bytes(group, stored, setup, widths), count * prod(shape_of(group, stored))
    operands = {}
    if word and isinstance(op, Gemm) and op.quantized and stored.width != "state":
        formats = setup.operands_of(op)  # what a float holds lies in its container
        operands = {name: of for name, of in OPERAND_OF.items() if not isinstance(formats[of], Identity)}
    writes = stored.own and (stored.written != UPDATE or op.kind == "adam")  # which writes the others' parameters
    shared = stored.name == "stash" and not group.owner  # an input is stashed once
    is_master = stored.width == "w" and setup.container_bits == WIDEST  # the master weights serve
    moves = [(stored.name, stored.written, "write")] if writes and not shared and not is_master else []
    for read in stored.reads:
        gradient = FOR_GRADIENT.get(read)
        if not gradient or getattr(op, gradient):
            moves.append((f"{stored.name} (for {read})", BACKWARD, "read") if gradient else (stored.name, read, "read"))
    return [
        Transfer(
            group,
            tensor=name,
            kind=_kind(op, stored, phase, direction),
            phase=phase,
            direction=direction,
            bytes=round(values * setup.stored_bits(op, operands[name], word) / 8)
            if isinstance(op, Gemm) and name in operands
            else size,
            values=values,
        )
        for name, phase, direction in moves
    ]


def _kind(op: Operation, stored: Stored, phase: str, direction: str) -> str:
    """Return the purpose of a tensor that is moved in a phase: one of KINDS."""
    if phase == UPDATE:
        return "optimizer"
    if stored.written in (BACKWARD, AFTER):
        return "gradients"
    weight = stored.name == "w" and isinstance(op, Gemm) and op.weight  # autocast's copy, too
    if weight or stored.written == UPDATE:
        return "weights"
    moved = "written" if direction == "write" else direction
    input_kept = phase == BACKWARD and stored.name == "x" and isinstance(op, Gemm) and op.weight and op.quantized
    return f"stash {moved}" if stored.width == "q1" or input_kept else f"activations {moved}"


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
    def phase(self) -> str:
        return FORWARD if self.name == FORWARD else BACKWARD

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
    """Return every matrix product of one training step."""
    products = []
    for group in workload.groups:
        op = group.operation
        if not isinstance(op, Gemm):
            continue
        operands = setup.operands_of(op)
        floats = setup.floats(WIDEST if op.container else setup.container_bits)
        names = ["forward", *["dx"] * op.x_grad, *["dw"] * op.w_grad, *["recompute"] * op.recompute]
        for name in names:
            first, second = (operands[operand] if op.quantized else floats for operand in _OPERANDS[name])
            products.append(CostedMatMul(group, op, name, first, second))
    return products


#: operands of each product, by their names in dsq.operands
_OPERANDS = {
    "forward": ("x", "w"),
    "dx": ("dy_for_dx", "w_for_dx"),
    "dw": ("dy_for_dw", "x_for_dw"),
    "recompute": ("x", "w"),
}
#: what each product multiplies, and their axes (rows of the first, sum, columns of the second)
_TILED = {"forward": ("x", "w", "MKN"), "dx": ("y", "w", "MNK"), "dw": ("y", "stash", "NMK")}


def _moved_again(matmul: CostedMatMul, setup: Setup, buffer: float, word: int) -> Transfer:
    """Return the bytes that tiles of a product move beside its tensors once: fetched again, or spilled (tiles.py)."""
    op, container = matmul.op, setup.container_bits / 8
    *names, axes = _TILED.get(matmul.name, _TILED["forward"])
    sizes = {"M": -(-op.M // op.weights), "K": op.K, "N": op.N}
    widths = dict.fromkeys(("x", "w", "y", "stash"), container)
    if op.quantized and setup.stash.packs:
        widths["stash"] = setup.stash.nbytes(Layout(1, op.M, op.K, along_rows=True)) / (op.M * op.K)
    if op.quantized and word:
        operands = zip(names, _OPERANDS[matmul.name], strict=True)
        widths = {name: setup.stored_bits(op, operand, word) / 8 for name, operand in operands}
    on_chip = {op.on_chip, "stash" if op.on_chip == "x" else ""}
    buffer_widths = tuple(widths[name] for name in names)
    dram_widths = (*(0.0 if name in on_chip else widths[name] for name in names), 0.0)  # the result moves once
    rows, summed, columns = (sizes[axis] for axis in axes)
    product = TiledProduct(rows, summed, columns, buffer_widths, dram_widths)
    nbytes = matmul.group.count * op.batch * op.weights * bytes_again(product, buffer)
    return Transfer(matmul.group, f"{matmul.name} again", "again", matmul.phase, "read", round(nbytes), 0)


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


def arithmetic_cost(products: list[CostedMatMul]) -> float:
    """Return the cost of the matrix products in fixed-point 32 x 32 multiply-accumulates."""
    return sum((product.total_macs * mac_cost(product.first, product.second) for product in products), start=0.0)
