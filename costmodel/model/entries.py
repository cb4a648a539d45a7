"""Memory of each operation of a training step under a policy of dsq.stash: the tensors saved for the backward, and
those that exist for a while. Each term is a function whose docstring is its equation."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, lru_cache

from dsq.costmodel.model.ledger import BATCH, BEFORE, RECOMPUTED, STATE_BITS, Stored
from dsq.costmodel.model.methods import CostedPolicy, Setup
from dsq.costmodel.model.operations import (
    CAST,
    CHUNK,
    ENCODER_OUT,
    Gemm,
    Group,
    Operation,
    Pointwise,
    SavedTensor,
    Workload,
)
from dsq.costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Identity
from dsq.stash_bits import MAX_EXACT_NUMEL


class Category(IntEnum):
    """The purpose of bytes, in the order of tables and pictures."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    STASH = 4
    LOGITS = 5
    TEMPORARY = 6


CATEGORIES = tuple(category.name.lower() for category in Category)
LOSSES = ("loss", "loss of fp32", "fused loss")
_match = cache(re.compile(r"^.*?\blayers\.\d+\.").match)
#: tensors of an operation's backward that are not saved by the forward
_BACKWARD_TENSORS = ("dy", "dx", "dx, df", "d gate, up", "da, db", "their sum", "their gradient")


@dataclass(frozen=True)
class SizedTensor:
    """One of an operation's tensors, and its sizes."""

    stored: Stored
    category: Category
    values: float
    nbytes: float  #: bytes
    saved_nbytes: float  #: as the policy saves it
    is_input: bool = False  #: a product's input, which operations name by their field `input`
    trace: int | None = None  #: its index in the operation's `saves`; None: the ledger has it

    @property
    def packed(self) -> bool:
        return self.saved_nbytes < self.nbytes

    @property
    def packed_values(self) -> float:
        """Values that are packed, without those that are one number a row."""
        return self.values if self.packed and self.stored.shape not in ("rows", "M") else 0.0

    def name(self, op: Operation) -> str:
        """Return the name by which other operations save this very tensor; empty: none does."""
        if self.trace is not None:
            return op.saves[self.trace].tensor if op.saves else ""
        if self.is_input:
            return op.input.removesuffix(CAST)
        return op.name if self.stored.name == "y" and op.saves is None else ""


@dataclass(frozen=True)
class OpBytes:
    """Bytes of each operation of a group, whatever its neighbors have saved already."""

    saved: tuple[SizedTensor, ...]
    entering: float  #: of the operation's input; 0: it has none
    in_codes: float  #: of that input as a recomputed layer saves it
    added: float  #: of a bias of scores that is shared by all layers
    made: float  #: of tensors that exist during the forward alone
    temporary: float  #: of tensors that exist during the backward alone
    gradients: float
    result: float  #: of a product's y, with the logarithms of sums that a fused kernel saves


@dataclass
class LedgerEntry:
    """One operation of a step, with its bytes."""

    op: Operation
    layer: str  #: see layer_of
    op_bytes: OpBytes
    saved: list[float] = field(default_factory=lambda: [0.0] * len(CATEGORIES))
    entering: float = 0  #: bytes of the layer's inputs that a recomputed layer saves here
    packed: list[float] = field(default_factory=list)  #: values of each tensor that is packed
    recomputed: list[float] = field(default_factory=list)  #: values of each tensor that the backward recomputes


def layer_of(op: Operation) -> str:
    """Return the name of the operation's layer, as "decoder.layers.3."; empty: it is in none."""
    match = _match(op.name)
    return match[0] if match else ""


def saved_results(workload: Workload) -> frozenset[str]:
    """Return the names of the products whose results selective recomputation saves: in each layer fused attention's,
    and those of the first, third, fifth... linear layer (torchtitan's default)."""
    saved, linear = [], defaultdict[str, int](int)
    for op in filter(layer_of, workload.gemms):
        linear[layer_of(op)] += op.weight
        if op.on_chip or (op.weight and linear[layer_of(op)] % 2):
            saved.append(op.name)
    return frozenset(saved)


def by_policy(workload: Workload, policy: CostedPolicy | None) -> Workload:
    """Return the workload whose attention, where it is one call, is a policy's, which fuses what PyTorch refuses."""
    fuses = policy and policy.bits and any(gemm.on_chip or gemm.score_bytes for gemm in workload.gemms)
    return workload.fusing_attention() if fuses else workload


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def entries_of(
    workload: Workload, setup: Setup, policy: CostedPolicy | None = None, recompute: bool = False
) -> list[LedgerEntry]:
    """Return an entry for each operation of a step, in order."""
    widths = widths_of(setup)
    workload = by_policy(workload, policy)
    by_index = dict[int, OpBytes]()
    for group in workload.groups:
        by_index |= dict.fromkeys(group.members, _op_bytes(group, setup, policy, widths, recompute))
    entries = []
    seen: set[tuple[object, ...]] = set() if setup.autocast else {(False, BATCH)}  # the batch is there before the step
    recomputed = recomputed_inputs(workload, policy) if policy and policy.bits else frozenset[str]()
    # of rounded inputs a router would choose other experts
    choosing = {layer_of(op) for op in workload.operations if op.kind == "expert gate"}
    for index, op in enumerate(workload.operations):
        entry = LedgerEntry(op, layer_of(op), by_index[index])
        for tensor in entry.op_bytes.saved:
            size, packed = tensor.saved_nbytes, tensor.packed_values
            # experts save theirs
            stashed = tensor.category is Category.STASH and isinstance(op, Gemm) and op.weights == 1
            if tensor.is_input and op.input in recomputed and (packed or stashed):
                size, packed = 0.0, tensor.values
                more = entry.op_bytes.entering * stashed  # x itself, recomputed where else its codes are read
                entry.op_bytes = replace(entry.op_bytes, temporary=entry.op_bytes.temporary + more)
            if _new(op, tensor, size, seen):
                entry.saved[tensor.category] += size
                if packed and not (recompute and entry.layer):
                    (entry.packed if size else entry.recomputed).append(packed)
        for key, size in _inputs(entry, entry.layer in choosing) if recompute and entry.layer else ():
            if size and key not in seen:
                seen.add(key)
                entry.entering += size
        entries.append(entry)
    return entries


def _inputs(entry: LedgerEntry, unrounded: bool) -> Iterator[tuple[tuple[object, ...], float]]:
    """Yield inputs that a recomputed layer saves at this operation, (name, bytes); all layers share some of them."""
    stack, entering = entry.layer.partition(".")[0], entry.op_bytes.entering if unrounded else entry.op_bytes.in_codes
    yield (entry.layer,), entering
    yield (stack, "added", entry.op_bytes.added), entry.op_bytes.added
    if entry.op.input == ENCODER_OUT:
        yield (stack, ENCODER_OUT), entering


def recomputed_inputs(workload: Workload, policy: CostedPolicy) -> frozenset[str]:
    """Return the names of the inputs of products that a policy recomputes from what the operation before saves."""
    makers = dict[str, str]()
    names, latest, kind = set(), "", ""
    for op in workload.operations:
        # a dropout's result is recomputed where what it drops out of is
        kind = makers[op.name] = op.kind if "dropout" not in op.kind else kind
        if isinstance(op, Pointwise):
            latest = kind if op.cls != "attention" else latest
        elif makers.get(op.input.removesuffix(CAST), latest) in RECOMPUTED and not policy.samples(op):
            names.add(op.input)
        if isinstance(op, Gemm) and not op.weight:
            latest = ""
    return frozenset(names - {""})


def _new(op: Operation, tensor: SizedTensor, size: float, seen: set[tuple[object, ...]]) -> bool:
    """Return whether no operation before saves this very tensor."""
    name = tensor.name(op)
    if not name:
        return True
    key = (tensor.stored.name == "stash" or bool(tensor.packed_values), name, int(size))
    there = key in seen or key[:2] in seen
    seen.add(key)
    return not there


# ---- the terms of an operation's memory


def _op_bytes(
    group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int], recompute: bool
) -> OpBytes:
    op = group.operation
    tensors = list(_ledger_tensors(group, setup, policy, widths))
    saved = tuple(tensor for tensor in _saved(op, tensors, setup, policy, widths) if _needed(op, tensor.stored))
    packed = [tensor for tensor in saved if tensor.packed]
    entering = _entering(tensors)
    forward = _forward_bytes(op, tensors, packed)
    backward = _backward_bytes(op, tensors, packed, setup, policy, recompute)
    if not op.backward:  # nothing saves its input, and its temporary tensors exist while y is made
        forward, backward = forward + (entering.nbytes if entering else 0.0) + backward, 0.0
    return OpBytes(
        saved=saved,
        entering=entering.nbytes if entering else 0.0,
        in_codes=_coded_input_bytes(entering, policy),
        added=_shared_bias_bytes(op, tensors),
        made=forward,
        temporary=backward,
        gradients=_gradient_bytes(op),
        result=_result_bytes(tensors),
    )


def _entering(tensors: list[SizedTensor]) -> SizedTensor | None:
    """Return the tensor that the operation before made: x."""
    return next((tensor for tensor in tensors if tensor.stored.written == BEFORE and tensor.nbytes), None)


def _coded_input_bytes(entering: SizedTensor | None, policy: CostedPolicy | None) -> float:
    """min(bytes of x, values of x * code bits / 8): the input of a recomputed layer."""
    if not entering:
        return 0.0
    if not policy or entering.values <= MAX_EXACT_NUMEL:
        return entering.nbytes
    return min(entering.nbytes, entering.values * policy.code_bits("boundary") / 8)


def _shared_bias_bytes(op: Operation, tensors: list[SizedTensor]) -> float:
    """Bytes of a bias of scores, which is made once for all layers; masks exist from step to step."""
    return sum(tensor.saved_nbytes for tensor in tensors if tensor.stored.shape == "bias" or op.kind == "fused bias")


def _forward_bytes(op: Operation, tensors: list[SizedTensor], packed: list[SizedTensor]) -> float:
    """sum(unpacked bytes of packed tensors) + y where nothing saves it + log p + a fused kernel's + a chunk's."""
    passing = sum(
        tensor.nbytes
        for tensor in tensors
        if tensor.stored.name == "log p" or (tensor.stored.name == "y" and not tensor.stored.saved)
    )
    return sum(tensor.nbytes for tensor in packed) + passing + _kernel_bytes(op) + _chunk_bytes(op, tensors)


def _kernel_bytes(op: Operation) -> float:
    """`score_bytes` for each of the M * K scores of a fused attention."""
    return op.score_bytes * op.batch * op.M * op.K if isinstance(op, Gemm) and op.on_chip == "x" else 0.0


def _chunk_bytes(op: Operation, tensors: list[SizedTensor]) -> float:
    """Bytes of all tensors of a loss made in chunks * min(1, CHUNK / rows)."""
    if not isinstance(op, Pointwise) or op.kind != "chunked loss":
        return 0.0
    return sum(tensor.nbytes for tensor in tensors) * min(1, CHUNK / op.rows)


def _backward_bytes(
    op: Operation,
    tensors: list[SizedTensor],
    packed: list[SizedTensor],
    setup: Setup,
    policy: CostedPolicy | None,
    recompute: bool,
) -> float:
    """dy + dx + 2 log p + gradients of copies + 16-bit operands + unpacked tensors, one at a time."""
    if policy and policy.bits and op.kind == "tied":
        return 0.0  # a row's gradient is a tensor of its own, to which autograd adds the table's in place
    unpacked = sum(tensor.nbytes / tensor.stored.times for tensor in packed)
    if op.kind == "activation" and packed and not recompute:  # a recomputed segment does not pack what it makes
        unpacked -= packed[0].nbytes  # dx is written over the x that was unpacked
    passing = sum(
        tensor.nbytes
        for tensor in tensors
        if tensor.stored.name in _BACKWARD_TENSORS
        and (tensor.category is not Category.LOGITS or tensor.stored.name == "their gradient")
    )
    # the gradient of log p, and that of the logits
    passing += sum(2 * tensor.nbytes for tensor in tensors if tensor.stored.name == "log p")
    return passing + _cast_gradient_bytes(op, setup) + _operand_bytes(op, setup) + unpacked + _kernel_bytes(op)


def _cast_gradient_bytes(op: Operation, setup: Setup) -> float:
    """2 bytes a parameter + fp32 dx of the residual stream: gradients of autocast's copies."""
    if not (isinstance(op, Gemm) and op.weight and op.weights == 1 and setup.autocast):
        return 0.0
    return op.parameters * 2 + (op.M * op.K * STATE_BITS / 8 if op.stream else 0)


def _operand_bytes(op: Operation, setup: Setup) -> float:
    """M (K + N) container bits / 8: codes are multiplied as 16-bit copies of both operands."""
    codes = not isinstance(setup.format, Identity) and setup.container_bits < WIDEST
    if not (isinstance(op, Gemm) and op.quantized and op.weight and codes):
        return 0.0
    return op.M * (op.K + op.N) * setup.container_bits / 8


def _gradient_bytes(op: Operation) -> float:
    """4 bytes for each parameter that trains."""
    return op.parameters * STATE_BITS / 8 if op.trains and op.kind != "adam" else 0.0


def _result_bytes(tensors: list[SizedTensor]) -> float:
    """Bytes of y, and of the logarithms of sums that a fused kernel saves."""
    return sum(tensor.nbytes for tensor in tensors if tensor.stored.name in ("y", "logsumexp"))


# ---- an operation's tensors


def _ledger_tensors(
    group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int]
) -> Iterator[SizedTensor]:
    op = group.operation
    for stored in tensors_of(group, setup):
        nbytes = float(stored.times * layout_bytes(group, stored, setup, widths))
        values = nbytes * 8 / (widths[stored.width] or 1)
        tensor = _sized(op, stored, nbytes, values, policy)
        # autocast casts x for each product that reads it
        shared = isinstance(op, Gemm) and stored.name in ("x", "stash") and not (setup.autocast and op.stream)
        yield replace(tensor, is_input=shared)


def _sized(op: Operation, stored: Stored, nbytes: float, values: float, policy: CostedPolicy | None) -> SizedTensor:
    category = _category(op, stored)
    size = policy.saved_bytes(op, stored, nbytes, values) if policy and category is not Category.STASH else nbytes
    return SizedTensor(stored, category, values, nbytes, size)


def _saved(
    op: Operation, tensors: list[SizedTensor], setup: Setup, policy: CostedPolicy | None, widths: dict[str, int]
) -> Iterator[SizedTensor]:
    """Yield the saved tensors: the ledger's, or those that were seen when the operation was traced.

    A trace ran in one dtype without conversion. So the ledger still says which roles are saved at all (a converted
    layer packs x), and adds the copies that this setup makes: stashes, casts, and what a fused kernel saves.
    """
    saved = [tensor for tensor in tensors if tensor.stored.saved]
    if op.saves is None:
        yield from saved
        return
    by_role = {tensor.stored.name: tensor for tensor in saved}
    for index, trace in enumerate(op.saves if op.backward else ()):
        tensor = by_role.get(trace.role)
        stored = tensor.stored if tensor else _unknown(op, trace)
        if tensor or not trace.role:
            bits = trace.bits or widths[stored.width]
            traced = _sized(op, stored, trace.values * bits / 8, trace.values, policy)
            yield replace(traced, is_input=bool(tensor and tensor.is_input), trace=index)
    roles = {trace.role for trace in op.saves}
    for tensor in saved:
        copy = tensor.stored.width.startswith("q") or tensor.stored.width == "cast"
        if copy or tensor.category is Category.PARAMETERS or {tensor.stored.name} - roles == {"logsumexp"}:
            yield tensor


def _unknown(op: Operation, trace: SavedTensor) -> Stored:
    """Return a saved tensor for which the operation's ledger has no role. One number a row is never packed."""
    one_a_row = isinstance(op, Pointwise) and trace.values <= op.rows
    width = op.container if isinstance(op, Pointwise) and op.container else "a"
    return Stored("saved", "values", width, BEFORE, saved=True, coded="" if one_a_row or trace.bits else "factor")


def _needed(op: Operation, stored: Stored) -> bool:
    """Return whether the backward needs the tensor: a frozen layer needs its weight alone, a frozen norm no normalized
    x."""
    if isinstance(op, Gemm):
        return stored.name != "x" or op.w_grad or bool(op.on_chip)
    return stored.name != "normalized" or op.trained


def _category(op: Operation, stored: Stored) -> Category:
    if op.kind in LOSSES:
        return Category.LOGITS
    if stored.name == "w" and isinstance(op, Gemm) and op.weight:
        return Category.PARAMETERS  # autocast's copy
    return Category.STASH if stored.width.startswith("q") else Category.ACTIVATIONS
