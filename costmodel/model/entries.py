"""What each operation of a training step keeps, makes and holds for a while, in bytes: the ledger's tensors, each owned
by one operation, as a policy of dsq.stash (POLICIES) packs them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, lru_cache

from costmodel.model.ledger import BATCH, BEFORE, STATE_BITS, Stored
from costmodel.model.operations import CAST, CHUNK, ENCODER_OUT, Gemm, Group, Operation, Pointwise, Workload
from costmodel.model.quantisation import Setup
from costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Identity

#: widths of kept tensors that no policy packs
EXACT_WIDTHS = ("mask", "ids")
#: values up to which a tensor stays exact
FEW = 256
#: values that are packed at a time
PACKED = 2**20
#: scale and index of a sampled row
ROW_BYTES = 4 + 8


@dataclass(frozen=True)
class Stash:
    """A policy, or policies together."""

    name: str
    bits: float = 32  #: of a kept float, scales included; 32: as it is
    loss_bits: float = 32  #: and of what the loss keeps
    masks: bool = False  #: a relu keeps one bit a value for itself, and so do zeros that are added to scores
    packing: int = 0  #: fp32 copies of a chunk that packing holds besides the tensor
    codes: int = 0  #: bits of its codes where dsq.pack, which `calibrate` times, is all it does
    ratio: float = 1  #: part of the rows of a linear layer's input that are kept

    def keeps(self, op: Operation, stored: Stored, size: float, values: float) -> float:
        """Bytes kept of one such tensor of so many bytes and values."""
        if stored.shape in ("rows", "M") or stored.width in EXACT_WIDTHS or values <= FEW:
            return size
        if isinstance(op, Gemm):
            linear = op.weight and op.quantised and op.weights == 1 and not op.transposed  # experts are none
            if self.ratio < 1 and linear and stored.name == "x":
                sampled = round(self.ratio * op.M) * op.K
                return sampled * min(size / values, self.bits / 8) + ROW_BYTES * self.ratio * op.M
            return min(size, values * self.bits / 8)
        bits = self.loss_bits if op.kind.startswith("loss") else self.bits
        if self.masks and op.kind in ("relu", "fused zero bias"):
            bits = 1
        return min(size, values * bits / 8)

    def packing_bytes(self, values: float) -> float:
        """What packing so many values holds besides the tensor."""
        return self.packing * 4 * min(values, PACKED)


#: name -> the policies that a plan compares
POLICIES = {
    stash.name: stash
    for stash in (
        Stash("selective", masks=True),  # a relu before a frozen layer keeps bits; else what PyTorch keeps
        Stash("bfp 4", 4 + 8 / 16, masks=True, codes=4),  # a box of 16 values shares 8 bits
        Stash("bfp 2", 2 + 8 / 16, masks=True, codes=2),
        Stash("mesa", 8, masks=False),
        Stash("gact 4", 4 + 64 / 256, 4 + 64 / 256, masks=True, packing=2),  # 256 values share two floats
        Stash("wtacrs 0.3", ratio=0.3),
        Stash("wtacrs 0.3 + bfp 4", 4 + 8 / 16, masks=True, ratio=0.3),
    )
}


class Category(IntEnum):
    """What bytes are there for, in the order of tables and pictures."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMISER = 2
    ACTIVATIONS = 3
    STASH = 4
    LOGITS = 5
    TEMPORARY = 6


CATEGORIES = tuple(category.name.lower() for category in Category)
LOSSES = ("loss", "loss of fp32")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
#: what an operation's backward holds besides
_DURING_BACKWARD = ("dy", "dx", "dx, df", "d gate, up", "da, db", "their sum")


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that an operation keeps from the forward for the backward, as a policy may pack it."""

    category: Category
    bytes: float
    packed: float  #: values that are packed; 0: kept as it is
    known_by: str = ""  #: the operation's field that names it for others that keep it too; empty: none does
    coded: bool = False  #: it is a stash, which layers with that input share


@dataclass(frozen=True)
class Alike:
    """Bytes that each operation of a group holds, whatever its neighbours keep already."""

    kept: tuple[KeptTensor, ...]
    entering: float  #: of the first tensor that was there before, as a layer's input is kept; 0: none was
    added: float  #: of a bias of scores, which every layer is given
    made: float  #: of y, while it is made
    temporary: float  #: that its backward holds besides
    gradients: float
    stream: float  #: of the residual stream, where this is a sum on it
    result: float  #: of y as a product makes it, with what a fused kernel keeps to make its scores again


@dataclass
class LedgerEntry:
    """One operation of a step, and what it holds."""

    op: Operation
    layer: str  #: as "decoder.layers.3."; empty: it is in none
    alike: Alike
    kept: list[float] = field(default_factory=lambda: [0.0] * len(CATEGORIES))
    entering: float = 0  #: what a recomputed layer keeps of this operation: what the layer is given
    packed: list[float] = field(default_factory=list)  #: values of each tensor that is packed


@cache
def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else ""


def in_layer(op: Operation) -> bool:
    """Whether it belongs to one of the alike layers, which recomputation runs again."""
    return bool(_layer(op.name))


def results_kept(workload: Workload) -> frozenset[str]:
    """The products whose results selective recomputation keeps, by name: in each layer fused attention's, and those of
    the first, third, fifth... linear layer (torchtitan's default)."""
    kept, linear = [], dict[str, int]()
    for op in filter(in_layer, workload.gemms):
        linear[_layer(op.name)] = linear.get(_layer(op.name), 0) + op.weight
        if op.on_chip or (op.weight and linear[_layer(op.name)] % 2):
            kept.append(op.name)
    return frozenset(kept)


def layer_of(op: Operation) -> str:
    """The name of its layer, as "decoder.layers.3."; empty: it is in none."""
    return _layer(op.name)


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def entries_of(
    workload: Workload, setup: Setup, policy: Stash | None = None, recompute: bool = False
) -> list[LedgerEntry]:
    widths = widths_of(setup)
    if recompute:
        workload = workload.recomputing_layers()
    alike: dict[str, Alike] = {}
    for group in workload.groups:
        alike |= dict.fromkeys(group.names, _alike(group, setup, policy, widths))
    entries = []
    seen: set[tuple[object, ...]] = set() if setup.autocast else {(False, BATCH)}  # the batch is there before the step
    for op in workload.operations:
        entry = LedgerEntry(op, _layer(op.name), alike[op.name])
        for kept in entry.alike.kept:
            if _new(op, kept, seen):
                entry.kept[kept.category] += kept.bytes
                if kept.packed and not (recompute and entry.layer):
                    entry.packed.append(kept.packed)
        for what, size in _given(entry) if recompute and entry.layer else ():
            if size and what not in seen:
                seen.add(what)
                entry.entering += size
        entries.append(entry)
    return entries


def _given(entry: LedgerEntry) -> Iterator[tuple[tuple[object, ...], float]]:
    """What a recomputed layer keeps that reaches it at this operation: its own input, and what all layers of the stack
    are given, the encoder's output, a bias of scores; each with a name."""
    stack = entry.layer.partition(".")[0]
    yield (entry.layer,), entry.alike.entering
    yield (stack, "added", entry.alike.added), entry.alike.added
    if isinstance(entry.op, Gemm) and entry.op.input == ENCODER_OUT:
        yield (stack, ENCODER_OUT), entry.alike.entering


def _new(op: Operation, kept: KeptTensor, seen: set[tuple[object, ...]]) -> bool:
    """Whether no operation before keeps this very tensor: an x by its `input`, a y by its maker's name."""
    name = kept.known_by and getattr(op, kept.known_by).removesuffix(CAST)
    if not name:
        return True
    key = (kept.coded, name, int(kept.bytes))
    there = key in seen or key[:2] in seen
    seen.add(key)
    return not there


@dataclass(frozen=True)
class _Tensor:
    """One of an operation's tensors, and what it takes."""

    stored: Stored
    category: Category
    values: float
    plain: float  #: bytes
    size: float  #: bytes as the policy keeps it

    @property
    def packed(self) -> bool:
        return self.size < self.plain


def _alike(group: Group, setup: Setup, policy: Stash | None, widths: dict[str, int]) -> Alike:
    op = group.operation
    tensors = list(_sized(group, setup, policy, widths))
    kept = [tensor for tensor in tensors if tensor.stored.kept and _needed(op, tensor.stored)]
    packed = [tensor for tensor in kept if tensor.packed]
    entering = next((tensor.size for tensor in tensors if tensor.stored.written == BEFORE and tensor.size), 0.0)
    added = sum(tensor.size for tensor in tensors if tensor.stored.shape == "bias")  # masks are there from step to step
    made = _made(tensors) + sum(tensor.plain for tensor in packed)
    temporary = _during_backward(op, tensors, setup) + sum(tensor.plain / tensor.stored.times for tensor in packed)
    if isinstance(op, Pointwise) and op.kind == "chunked loss":
        made += sum(tensor.plain for tensor in tensors) * min(1, CHUNK / op.rows)
    if not op.backward:  # nothing keeps its input, and it holds what it needs while y is made
        made, temporary = made + entering + temporary, 0.0
    packing = max((policy.packing_bytes(tensor.values) for tensor in packed), default=0.0) if policy else 0.0
    updated = op.trains and getattr(op, "kind", "") != "adam"
    gradients = op.parameters * STATE_BITS / 8 if updated else 0.0
    stream = made if isinstance(op, Pointwise) and op.kind == "residual" else 0.0
    result = sum(tensor.plain for tensor in tensors if tensor.stored.name in ("y", "logsumexp"))
    keeps = tuple(_kept(op, tensor, setup) for tensor in kept)
    return Alike(keeps, entering, added, made + packing, temporary, gradients, stream, result)


def _sized(group: Group, setup: Setup, policy: Stash | None, widths: dict[str, int]) -> Iterator[_Tensor]:
    for stored in tensors_of(group, setup):
        plain = stored.times * float(layout_bytes(group, stored, setup, widths)[0])
        values = plain * 8 / (float(widths[stored.width]) or 1)
        category = _category(group.operation, stored)
        packs = policy is not None and category is not Category.STASH
        size = policy.keeps(group.operation, stored, plain, values) if policy and packs else plain
        yield _Tensor(stored, category, values, plain, size)


def _made(tensors: list[_Tensor]) -> float:
    """Bytes that are there while y is made: y, where nothing keeps it, and the logits."""
    made = sum(tensor.plain for tensor in tensors if tensor.stored.name == "y" and not tensor.stored.kept)
    return made + sum(tensor.plain for tensor in tensors if tensor.stored.name == "log p")


def _during_backward(op: Operation, tensors: list[_Tensor], setup: Setup) -> float:
    """Bytes that the backward holds for a while, unpacked tensors aside."""
    bytes_ = 0.0
    for tensor in tensors:
        if tensor.stored.name in _DURING_BACKWARD and tensor.category is not Category.LOGITS:
            bytes_ += tensor.plain
        if tensor.stored.name == "log p":  # its gradient, and that of the logits
            bytes_ += 2 * tensor.plain
    if isinstance(op, Gemm) and op.weight and op.weights == 1 and setup.autocast:  # the gradients of its copies
        bytes_ += op.parameters * 2 + (op.M * op.K * STATE_BITS / 8 if op.stream else 0)
    if isinstance(op, Gemm) and _multiplies_copies(op, setup):
        bytes_ += op.M * (op.K + op.N) * float(setup.container_bits) / 8
    return bytes_


def _kept(op: Operation, tensor: _Tensor, setup: Setup) -> KeptTensor:
    packed = tensor.values if tensor.packed else 0.0
    known_by = _known_by(op, tensor.stored, setup.autocast)
    return KeptTensor(tensor.category, tensor.size, packed, known_by, coded=tensor.stored.name == "stash")


def _multiplies_copies(op: Gemm, setup: Setup) -> bool:
    """Codes are multiplied as floats: where tensors are 16 bits wide, copies of both operands beyond scratch memory."""
    return (
        op.quantised and op.weight and not isinstance(setup.format, Identity) and float(setup.container_bits) < WIDEST
    )


def _needed(op: Operation, stored: Stored) -> bool:
    """Whether the backward needs the tensor: of a frozen layer the weight alone, of a frozen norm no normalised x."""
    if isinstance(op, Gemm):
        return stored.name != "x" or op.w_grad or bool(op.on_chip)
    return stored.name != "normalised" or op.trained


def _known_by(op: Operation, stored: Stored, autocast: bool) -> str:
    if isinstance(op, Gemm) and stored.name in ("x", "stash"):
        return "" if autocast and op.stream else "input"  # autocast casts x for each that reads it
    return "name" if stored.name == "y" else ""


def _category(op: Operation, stored: Stored) -> Category:
    if not isinstance(op, Gemm) and op.kind in LOSSES:
        return Category.LOGITS
    if stored.name == "w" and isinstance(op, Gemm) and op.weight:
        return Category.PARAMETERS  # autocast's copy
    return Category.STASH if stored.width.startswith("q") else Category.ACTIVATIONS
