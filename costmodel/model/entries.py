"""Bytes that each operation of a training step keeps, makes and holds for a while, under a policy of dsq.stash."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, lru_cache

from dsq.costmodel.model.ledger import BATCH, BEFORE, MADE_AGAIN, STATE_BITS, Stored
from dsq.costmodel.model.methods import CostedPolicy, Setup
from dsq.costmodel.model.operations import CAST, CHUNK, ENCODER_OUT, Gemm, Group, Operation, Pointwise, Workload
from dsq.costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Identity
from dsq.stash_bits import MAX_EXACT_NUMEL


class Category(IntEnum):
    """The purpose of bytes, in the order of tables and pictures."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMISER = 2
    ACTIVATIONS = 3
    STASH = 4
    LOGITS = 5
    TEMPORARY = 6


CATEGORIES = tuple(category.name.lower() for category in Category)
LOSSES = ("loss", "loss of fp32")
_match = cache(re.compile(r"^.*?\blayers\.\d+\.").match)
#: tensors that an operation's backward holds beside the kept ones
_DURING_BACKWARD = ("dy", "dx", "dx, df", "d gate, up", "da, db", "their sum")


@dataclass(frozen=True)
class SizedTensor:
    """One of an operation's tensors, and its sizes."""

    stored: Stored
    category: Category
    values: float
    plain: float  #: bytes
    size: float  #: bytes as the policy keeps it
    known_by: str  #: the operation's field that names it for others that keep it too; empty: none does

    @property
    def packed(self) -> bool:
        return self.size < self.plain

    @property
    def packed_values(self) -> float:
        """Values that are packed, but for one number a row."""
        return self.values if self.packed and self.stored.shape not in ("rows", "M") else 0.0


@dataclass(frozen=True)
class Alike:
    """Bytes that each operation of a group holds, not knowing what its neighbors keep already."""

    kept: tuple[SizedTensor, ...]
    entering: float  #: of the operation's input; 0: it has none
    in_codes: float  #: of that input as a recomputed layer keeps it
    added: float  #: of a bias of scores that is shared by all layers
    made: float  #: of y, while it is made
    temporary: float  #: that the backward holds beside the kept tensors
    gradients: float
    result: float  #: of a product's y, with the logarithms of sums that a fused kernel keeps


@dataclass
class LedgerEntry:
    """One operation of a step, with the bytes it holds."""

    op: Operation
    layer: str  #: see layer_of
    alike: Alike
    kept: list[float] = field(default_factory=lambda: [0.0] * len(CATEGORIES))
    entering: float = 0  #: bytes of the layer's inputs that a recomputed layer keeps here
    packed: list[float] = field(default_factory=list)  #: values of each tensor that is packed
    again: list[float] = field(default_factory=list)  #: values of each tensor that the backward makes again


def layer_of(op: Operation) -> str:
    """The name of the operation's layer, as "decoder.layers.3."; empty: it is in none."""
    match = _match(op.name)
    return match[0] if match else ""


def results_kept(workload: Workload) -> frozenset[str]:
    """The products whose results selective recomputation keeps, by name: in each layer fused attention's, and those of
    the first, third, fifth... linear layer (torchtitan's default)."""
    kept, linear = [], defaultdict[str, int](int)
    for op in filter(layer_of, workload.gemms):
        linear[layer_of(op)] += op.weight
        if op.on_chip or (op.weight and linear[layer_of(op)] % 2):
            kept.append(op.name)
    return frozenset(kept)


def by_policy(workload: Workload, policy: CostedPolicy | None) -> Workload:
    """The workload whose attention, where it is one call, is a policy's, which fuses what PyTorch's kernels refuse."""
    fuses = policy and policy.bits and any(gemm.on_chip or gemm.beside for gemm in workload.gemms)
    return workload.fusing_attention() if fuses else workload


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def entries_of(
    workload: Workload, setup: Setup, policy: CostedPolicy | None = None, recompute: bool = False
) -> list[LedgerEntry]:
    """An entry for each operation of a step, in order."""
    widths = widths_of(setup)
    workload = by_policy(workload, policy)
    alike: dict[str, Alike] = {}
    for group in workload.groups:
        alike |= dict.fromkeys(group.names, _alike(group, setup, policy, widths, recompute))
    entries = []
    seen: set[tuple[object, ...]] = set() if setup.autocast else {(False, BATCH)}  # the batch is there before the step
    again = made_again(workload, policy) if policy and policy.bits else frozenset[str]()
    # of rounded inputs a router would choose other experts
    choosing = {layer_of(op) for op in workload.operations if op.kind == "expert gate"}
    for op in workload.operations:
        entry = LedgerEntry(op, layer_of(op), alike[op.name])
        for tensor in entry.alike.kept:
            size, packed = tensor.size, tensor.packed_values
            # experts keep theirs
            stashed = tensor.category is Category.STASH and isinstance(op, Gemm) and op.weights == 1
            if tensor.known_by == "input" and op.input in again and (packed or stashed):
                size, packed = 0.0, tensor.values
                more = entry.alike.entering * stashed  # x itself, made again where else its codes are read
                entry.alike = replace(entry.alike, temporary=entry.alike.temporary + more)
            if _new(op, tensor, size, seen):
                entry.kept[tensor.category] += size
                if packed and not (recompute and entry.layer):
                    (entry.packed if size else entry.again).append(packed)
        for what, size in _given(entry, entry.layer in choosing) if recompute and entry.layer else ():
            if size and what not in seen:
                seen.add(what)
                entry.entering += size
        entries.append(entry)
    return entries


def _given(entry: LedgerEntry, exact: bool) -> Iterator[tuple[tuple[object, ...], float]]:
    """Inputs that a recomputed layer keeps at this operation, (name, bytes); all layers share some of them."""
    stack, entering = entry.layer.partition(".")[0], entry.alike.entering if exact else entry.alike.in_codes
    yield (entry.layer,), entering
    yield (stack, "added", entry.alike.added), entry.alike.added
    if entry.op.input == ENCODER_OUT:
        yield (stack, ENCODER_OUT), entering


def made_again(workload: Workload, policy: CostedPolicy) -> frozenset[str]:
    """The inputs of products that a policy makes again of what the operation before keeps, by name."""
    makers = dict[str, str]()
    found, latest, kind = set(), "", ""
    for op in workload.operations:
        # a dropout's result is made again where what it drops out of is
        kind = makers[op.name] = op.kind if "dropout" not in op.kind else kind
        if isinstance(op, Pointwise):
            latest = kind if op.cls != "attention" else latest
        elif makers.get(op.input.removesuffix(CAST), latest) in MADE_AGAIN and not policy.samples(op):
            found.add(op.input)
        if isinstance(op, Gemm) and not op.weight:
            latest = ""
    return frozenset(found - {""})


def _new(op: Operation, tensor: SizedTensor, size: float, seen: set[tuple[object, ...]]) -> bool:
    """Whether no operation before keeps this very tensor: an x by its `input`, a y by its maker's name."""
    name = tensor.known_by and getattr(op, tensor.known_by).removesuffix(CAST)
    if not name:
        return True
    key = (tensor.stored.name == "stash" or bool(tensor.packed_values), name, int(size))
    there = key in seen or key[:2] in seen
    seen.add(key)
    return not there


def _alike(group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int], recompute: bool) -> Alike:
    op = group.operation
    tensors = list(_sized(group, setup, policy, widths))
    kept = tuple(tensor for tensor in tensors if tensor.stored.kept and _needed(op, tensor.stored))
    packed = [tensor for tensor in kept if tensor.packed]
    given = next((tensor for tensor in tensors if tensor.stored.written == BEFORE and tensor.plain), None)
    in_codes = entering = given.plain if given else 0.0
    if given and policy and given.values > MAX_EXACT_NUMEL:
        in_codes = min(entering, given.values * policy.code_bits("boundary") / 8)
    # masks are there from step to step
    added = sum(tensor.size for tensor in tensors if tensor.stored.shape == "bias" or op.kind == "fused bias")
    made = sum(tensor.plain for tensor in packed)  # y besides, where nothing keeps it, and the logits
    made += sum(
        it.plain for it in tensors if it.stored.name == "log p" or (it.stored.name == "y" and not it.stored.kept)
    )
    temporary = _during_backward(op, tensors, setup) + sum(tensor.plain / tensor.stored.times for tensor in packed)
    if op.kind == "activation" and packed and not recompute:  # whose segments keep what they make as it is
        temporary -= packed[0].plain  # dx is written over the x that was unpacked
    if policy and policy.bits and op.kind == "tied":
        temporary = 0.0  # a row's gradient is a tensor of its own, to which autograd adds the table's in place
    if isinstance(op, Gemm) and op.on_chip == "x":
        made, temporary = (held + op.beside * op.batch * op.M * op.K for held in (made, temporary))
    if isinstance(op, Pointwise) and op.kind == "chunked loss":
        made += sum(tensor.plain for tensor in tensors) * min(1, CHUNK / op.rows)
    if not op.backward:  # nothing keeps its input, and it holds what it needs while y is made
        made, temporary = made + (given.plain if given else 0.0) + temporary, 0.0
    gradients = op.parameters * STATE_BITS / 8 if op.trains and op.kind != "adam" else 0.0
    result = sum(tensor.plain for tensor in tensors if tensor.stored.name in ("y", "logsumexp"))
    return Alike(kept, entering, in_codes, added, made, temporary, gradients, result)


def _sized(group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int]) -> Iterator[SizedTensor]:
    op = group.operation
    for stored in tensors_of(group, setup):
        plain = float(stored.times * layout_bytes(group, stored, setup, widths))
        values, category = plain * 8 / (widths[stored.width] or 1), _category(op, stored)
        size = policy.keeps(op, stored, plain, values) if policy and category is not Category.STASH else plain
        yield SizedTensor(stored, category, values, plain, size, _known_by(op, stored, setup.autocast))


def _during_backward(op: Operation, tensors: list[SizedTensor], setup: Setup) -> float:
    """Bytes that the backward holds for a while, unpacked tensors aside."""
    bytes_ = sum(
        it.plain for it in tensors if it.stored.name in _DURING_BACKWARD and it.category is not Category.LOGITS
    )
    bytes_ += sum(2 * it.plain for it in tensors if it.stored.name == "log p")  # its gradient, and that of the logits
    if isinstance(op, Gemm) and op.weight and op.weights == 1 and setup.autocast:  # the gradients of its copies
        bytes_ += op.parameters * 2 + (op.M * op.K * STATE_BITS / 8 if op.stream else 0)
    codes = not isinstance(setup.format, Identity) and setup.container_bits < WIDEST
    if isinstance(op, Gemm) and op.quantized and op.weight and codes:  # multiplied as 16-bit copies of both operands
        bytes_ += op.M * (op.K + op.N) * setup.container_bits / 8
    return bytes_


def _needed(op: Operation, stored: Stored) -> bool:
    """Whether the backward needs the tensor: a frozen layer needs its weight alone, a frozen norm no normalized x."""
    if isinstance(op, Gemm):
        return stored.name != "x" or op.w_grad or bool(op.on_chip)
    return stored.name != "normalized" or op.trained


def _known_by(op: Operation, stored: Stored, autocast: bool) -> str:
    if isinstance(op, Gemm) and stored.name in ("x", "stash"):
        return "" if autocast and op.stream else "input"  # autocast casts x for each that reads it
    return "name" if stored.name == "y" else ""


def _category(op: Operation, stored: Stored) -> Category:
    if op.kind in LOSSES:
        return Category.LOGITS
    if stored.name == "w" and isinstance(op, Gemm) and op.weight:
        return Category.PARAMETERS  # autocast's copy
    return Category.STASH if stored.width.startswith("q") else Category.ACTIVATIONS
