"""Every tensor a training step moves between DRAM and the chip, from first principles.

A tensor is charged at the width its matrix product takes or gives it; the conversion happens on chip where the tensor
is made, so there is no separate conversion pass. Tensors no quantiser touches move at the container width `a` (16
bits when all of q0..q3 fit, else 32); master weights, their gradients and Adam's moments at 32. Elementwise passes
are not fused with their neighbours; dropout's mask is remade from its seed and moves nothing.

One Move is one row of the tables below; `transfers` turns a workload into bytes. Bit widths may be numpy arrays.
"""

from dataclasses import dataclass
from math import prod

from costmodel.model.operations import Gemm, Group, Pointwise, Workload
from costmodel.model.quantisation import Bits, Setup, nbytes, scale_bytes
from costmodel.model.tiles import reads, tile_edge
from dsq.formats import MAX_PACKED_BITS, Identity

#: width of master weights, weight gradients, biases and Adam's moments
STATE_BITS = 32


@dataclass(frozen=True)
class Move:
    """One tensor crossing the DRAM boundary in a matrix product."""

    tensor: str
    phase: str  #: "forward", "backward" or "update"
    direction: str  #: "read" or "write"
    shape: str  #: its two axes, of M (tokens), K (in-features), N (out-features)
    width: str  #: "q0".."q3", "a" (container) or "state"
    boxes: str  #: the axis boxes run along
    reread: str = ""  #: the output axis it lacks: read once for every tile along it
    needs: str = ""  #: moved only if this holds: "x_grad", "w_grad", or "owner" (the first layer to use its input)


#: paper, figure 2 and section 3: the three products of a linear layer; boxes along the axis the product sums over
GEMM_MOVES = (
    Move("x", "forward", "read", "MK", "q0", "columns", reread="N"),
    Move("w", "forward", "read", "NK", "q0", "columns", reread="M"),
    Move("y", "forward", "write", "MN", "q0", "columns"),
    Move("stash", "forward", "write", "MK", "q1", "rows", needs="owner"),
    Move("dy (for dx)", "backward", "read", "MN", "q2", "columns", reread="K", needs="x_grad"),
    Move("w (for dx)", "backward", "read", "NK", "q1", "rows", reread="M", needs="x_grad"),
    Move("dx", "backward", "write", "MK", "q3", "columns", needs="x_grad"),
    Move("dy (for dw)", "backward", "read", "MN", "q3", "rows", reread="K", needs="w_grad"),
    Move("stash", "backward", "read", "MK", "q1", "rows", reread="N", needs="w_grad"),
    Move("dw", "backward", "write", "NK", "state", "columns", needs="w_grad"),
)

#: what differs when the second operand is an activation too (attention): it is stashed, and its gradient is a q3 output
SECOND_ACTIVATION_MOVES = (
    Move("stash of w", "forward", "write", "NK", "q1", "rows", needs="x_grad"),
    Move("dw", "backward", "write", "NK", "q3", "columns", needs="w_grad"),
)


@dataclass(frozen=True)
class Pass:
    """One tensor of (rows, width) values read or written by a pointwise operation."""

    tensor: str
    phase: str
    direction: str
    width: str = "a"
    per: str = "values"  #: "values" (rows * width), "rows" or "parameters"
    times: int = 1


_X, _Y = Pass("x", "forward", "read"), Pass("y", "forward", "write")
_DY, _DX = Pass("dy", "backward", "read"), Pass("dx", "backward", "write")
_UNARY = (_X, _Y, _DY, Pass("saved", "backward", "read"), _DX)
#: what each pointwise operation moves
POINTWISE: dict[str, tuple[Pass, ...]] = {
    "activation": _UNARY,
    "softmax": _UNARY,
    "norm": (
        *_UNARY,
        Pass("scale and shift", "forward", "read", "state", "parameters"),
        Pass("scale and shift", "backward", "read", "state", "parameters"),
        Pass("d scale and shift", "backward", "write", "state", "parameters"),
    ),
    "gate": (  # y = f(gate) * up
        Pass("gate, up", "forward", "read", times=2),
        _Y,
        _DY,
        Pass("gate, up", "backward", "read", times=2),
        Pass("d gate, up", "backward", "write", times=2),
    ),
    # y = x + f(x); backward sums the two branches' gradients
    "residual": (Pass("x, f", "forward", "read", times=2), _Y, Pass("dx, df", "backward", "read", times=2), _DX),
    "scale": (_X, _Y, _DY, _DX),  # score scaling and masking
    "embedding": (  # rows gathered; gradient rows accumulated
        Pass("token ids", "forward", "read", "ids", "rows"),
        Pass("table rows", "forward", "read", "state"),
        _Y,
        _DY,
        Pass("d table rows", "backward", "read", "state"),
        Pass("d table rows", "backward", "write", "state"),
    ),
    "loss": (  # cross-entropy over (rows, vocabulary)
        Pass("logits", "forward", "read"),
        Pass("logits", "backward", "read"),
        Pass("d logits", "backward", "write"),
    ),
    "adam": (  # a row a parameter
        Pass("w", "update", "read", "state"),
        Pass("dw", "update", "read", "state"),
        Pass("moments", "update", "read", "state", times=2),
        Pass("w", "update", "write", "state"),
        Pass("moments", "update", "write", "state", times=2),
    ),
    "parameters": (),  # parameters that move nothing but in the update
}
ID_BITS = 64


@dataclass(frozen=True)
class Transfer:
    """One named tensor's traffic: `bytes` is per operation and includes `times` reads."""

    group: Group
    tensor: str
    phase: str
    direction: str
    shape: tuple[int, ...]
    width: str
    bits: Bits
    times: int
    bytes: Bits
    scales: Bits = 0  #: the part of `bytes` that is no codes

    @property
    def total(self) -> Bits:
        """Bytes of the whole group."""
        return self.bytes * self.group.count


def transfers(workload: Workload, setup: Setup, on_chip_bytes: float) -> list[Transfer]:
    """Every tensor moved in one training step."""
    edge, container = tile_edge(on_chip_bytes), setup.container_bits
    widths = {f"q{i}": bits for i, bits in enumerate(setup.precision)}
    widths |= {"a": container, "state": STATE_BITS, "ids": ID_BITS}
    listed: list[Transfer] = []
    for group in workload.groups:
        if isinstance(group.operation, Gemm):
            listed += _of_gemm(group, group.operation, setup, widths, edge)
        else:
            listed += _of_pointwise(group, group.operation, widths)
    return listed


def stash_bytes(gemm: Gemm, setup: Setup) -> Bits:
    """Bytes dsq keeps of x between forward and backward for one converted layer that owns its input."""
    return nbytes(setup.format, setup.precision.q1, setup.layout(gemm.batch, gemm.M, gemm.K, "rows"))


def total_stash_bytes(workload: Workload, setup: Setup) -> Bits:
    """Bytes stashed by all converted linear layers together; a shared input counts once."""
    total: Bits = 0
    for group in workload.groups:
        op = group.operation
        if isinstance(op, Gemm) and op.quantised and op.weight and op.w_grad and group.owner:
            total = total + group.count * stash_bytes(op, setup)
    return total


def moves(gemm: Gemm) -> tuple[Move, ...]:
    """The rows of the tables that apply to this operation."""
    if gemm.weight:
        return GEMM_MOVES
    return tuple(m for m in GEMM_MOVES if m.tensor != "dw") + SECOND_ACTIVATION_MOVES


def _of_gemm(group: Group, gemm: Gemm, setup: Setup, widths: dict[str, Bits], edge: int) -> list[Transfer]:
    size = {"M": gemm.M, "K": gemm.K, "N": gemm.N}
    present = {"": True, "x_grad": gemm.x_grad, "w_grad": gemm.w_grad, "owner": group.owner and gemm.w_grad}
    on_chip = {"x": "MK", "y": "MN", "": ""}[gemm.on_chip]
    listed = []
    for move in moves(gemm):
        stashing = move.tensor.startswith("stash") and move.direction == "write"
        if not present[move.needs] or move.shape == on_chip or (stashing and not gemm.quantised):
            continue  # an unconverted layer stashes x itself, which is in DRAM already
        width = move.width if gemm.quantised or move.width == "state" else "a"
        stored = setup.format if gemm.quantised and move.width != "state" else Identity()
        rows, columns = (size[axis] for axis in move.shape)
        layout, bits = setup.layout(gemm.batch, rows, columns, move.boxes), widths[width]
        times = reads(size[move.reread], edge) if move.reread else 1
        moved, scales = times * nbytes(stored, bits, layout), times * scale_bytes(stored, bits, layout)
        if stashing:  # above 16 bits dsq keeps x itself: nothing is written
            moved = moved * (bits <= MAX_PACKED_BITS)
        shape = (rows, columns) if gemm.batch == 1 else (gemm.batch, rows, columns)
        listed.append(
            Transfer(group, move.tensor, move.phase, move.direction, shape, width, bits, times, moved, scales)
        )
    if gemm.bias:
        moved = gemm.N * STATE_BITS // 8
        for tensor, phase, direction in (("bias", "forward", "read"), ("d bias", "backward", "write")):
            listed.append(Transfer(group, tensor, phase, direction, (gemm.N,), "state", STATE_BITS, 1, moved))
    return listed


def _of_pointwise(group: Group, op: Pointwise, widths: dict[str, Bits]) -> list[Transfer]:
    shapes = {"values": (op.rows, op.width), "rows": (op.rows,), "parameters": (op.parameters,)}
    listed = []
    for move in POINTWISE[op.kind]:
        shape, bits = shapes[move.per], widths[move.width]
        moved = move.times * prod(shape) * bits // 8
        listed.append(
            Transfer(group, move.tensor, move.phase, move.direction, shape, move.width, bits, move.times, moved)
        )
    return listed
