"""Memory of each operation of a training step under a policy of dsq.stash: the tensors saved for the backward, and
those that exist for a while. Each term is a function whose docstring is its equation.

All sizes are bytes of one micro-batch on one device. memory.py sums them over time, devices and ZeRO's shards. Take
y = x w in codes of 4.5 bits, x of M K values, in a container of 16 bits:

    Stored       (ledger.toml) x exists, is saved, is coded as "linear"; without a size
    SizedTensor  x of this operation: values M K, nbytes 2 M K, saved_nbytes 0.5625 M K
    OpBytes      this operation alone: x and its other saved tensors, its temporary tensors, its weight's gradient
    LedgerEntry  the operation in its place in the step: x counts in `saved` only if no operation before saves it
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, lru_cache
from math import prod

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
    TracedTensor,
    Workload,
)
from dsq.costmodel.model.traffic import layout_bytes, shape_of, tensors_of, widths_of
from dsq.formats import WIDEST, Identity
from dsq.stash_bits import MAX_EXACT_NUMEL

#: the purposes of bytes, in the order of tables and pictures
Category = IntEnum(
    "Category", ["PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "STASH", "LOGITS", "TEMPORARY"], start=0
)
CATEGORIES: tuple[str, ...] = tuple(category.name.lower() for category in Category)
LOSSES = ("loss", "loss of fp32", "loss of fp32, smoothed", "fused loss")
#: a saved tensor as the operations that share it name it, whether it is in codes, and its bytes
Storage = tuple[str, bool, int]
_match = cache(re.compile(r"^.*?\blayers\.\d+\.").match)
#: tensors of an operation's backward that are not saved by the forward
_BACKWARD_TENSORS = ("dy", "dx", "dx, df", "d gate, up", "da, db", "their sum", "their gradient")


@dataclass(frozen=True)
class SizedTensor:
    """One of an operation's tensors, and its sizes."""

    stored: Stored
    category: Category
    values: float
    nbytes: float  #: as it exists while it is computed with
    saved_nbytes: float  #: as the policy saves it; 0: the backward recomputes it
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
    """Bytes of one operation, whatever its neighbors have saved already."""

    saved: tuple[SizedTensor, ...]
    input: float  #: of the operation's input; 0: it has none
    coded_input: float  #: of that input as a recomputed layer saves it
    shared_bias: float  #: of a bias of scores, which all layers share
    forward_temporary: float  #: of tensors that exist during the forward alone
    backward_temporary: float  #: of tensors that exist during the backward alone
    gradients: float
    result: float  #: of a product's y, with the logarithms of sums that a fused kernel saves


@dataclass(frozen=True)
class LedgerEntry:
    """One operation of a step, with its bytes."""

    op: Operation
    layer: str  #: see layer_of
    op_bytes: OpBytes
    saved: tuple[float, ...]  #: by category, what no operation before saves
    layer_input: float  #: of the layer's inputs that a recomputed layer saves here
    packed: tuple[float, ...]  #: values of each tensor that is packed
    recomputed: tuple[float, ...]  #: values of each tensor that the backward recomputes


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


@lru_cache(maxsize=64)
def by_policy(workload: Workload, policy: CostedPolicy | None) -> Workload:
    """Return the workload whose attention, where it is one call, is a policy's, which fuses what PyTorch refuses."""
    fuses = policy and policy.bits and any(gemm.on_chip or gemm.score_bytes for gemm in workload.gemms)
    return workload.fusing_attention() if fuses else workload


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def entries_of(
    workload: Workload, setup: Setup, policy: CostedPolicy | None = None, recompute: bool = False
) -> tuple[LedgerEntry, ...]:
    """Return an entry for each operation of a step, in order.

    Args:
        setup: the formats of operands, and the container's width.
        policy: how saved tensors are packed; None: they are saved as PyTorch saves them.
        recompute: whether a layer saves its inputs alone, and the backward runs its forward again.
    """
    widths, workload = widths_of(setup), by_policy(workload, policy)
    by_group = ((group, _op_bytes(group, setup, policy, widths, recompute)) for group in workload.groups)
    by_index = {index: op_bytes for group, op_bytes in by_group for index in group.members}
    storages, layer_inputs = set[Storage](), set[tuple[object, ...]]()
    recomputes = policy and policy.bits and not setup.names_stash
    remade = recomputed_inputs(workload, policy) if policy and recomputes else frozenset()
    # of rounded inputs a router would choose other experts
    choosing = {layer_of(op) for op in workload.operations if op.kind == "expert gate"}
    entries = []
    for index, op in enumerate(workload.operations):
        layer, op_bytes = layer_of(op), by_index[index]
        saved, packed, recomputed = [0.0] * len(CATEGORIES), list[float](), list[float]()
        for tensor in op_bytes.saved:
            size, values = tensor.saved_nbytes, tensor.packed_values
            # experts save theirs
            stashed = tensor.category is Category.STASH and isinstance(op, Gemm) and op.weights == 1
            if tensor.is_input and op.input in remade and (values or stashed):
                size, values = 0.0, tensor.values
                input_bytes = op_bytes.input * stashed  # x itself, recomputed where else its codes are read
                op_bytes = replace(op_bytes, backward_temporary=op_bytes.backward_temporary + input_bytes)
            if _is_new(op, tensor, size, setup, storages):
                saved[tensor.category] += size
                if values and not (recompute and layer):
                    (packed if size else recomputed).append(values)
        inputs = _layer_inputs(op, layer, op_bytes, layer in choosing) if recompute and layer else {}
        layer_input = sum(size for key, size in inputs.items() if key not in layer_inputs)
        layer_inputs |= {key for key, size in inputs.items() if size}
        entries.append(LedgerEntry(op, layer, op_bytes, tuple(saved), layer_input, tuple(packed), tuple(recomputed)))
    return tuple(entries)


def _layer_inputs(op: Operation, layer: str, op_bytes: OpBytes, unrounded: bool) -> dict[tuple[object, ...], float]:
    """Return the inputs that a recomputed layer saves at this operation, name -> bytes; all layers share some."""
    stack, entering = layer.partition(".")[0], op_bytes.input if unrounded else op_bytes.coded_input
    return {
        (layer,): entering,
        (stack, "bias", op_bytes.shared_bias): op_bytes.shared_bias,
        (stack, ENCODER_OUT): entering if op.input == ENCODER_OUT else 0.0,
    }


def recomputed_inputs(workload: Workload, policy: CostedPolicy) -> frozenset[str]:
    """Return the names of the inputs of products that a policy recomputes from what the operation before saves, as the
    input of fc2 from that of a GELU: the kinds of RECOMPUTED in ledger.toml."""
    makers = dict[str, str]()
    names, latest_kind, kind = set(), "", ""
    for op in workload.operations:
        # a dropout's result is recomputed where what it drops out of is
        kind = makers[op.name] = op.kind if "dropout" not in op.kind else kind
        if isinstance(op, Pointwise):
            latest_kind = kind if op.cls != "attention" else latest_kind
        elif makers.get(op.input.removesuffix(CAST), latest_kind) in RECOMPUTED and not policy.samples(op):
            names.add(op.input)
        if isinstance(op, Gemm) and not op.weight:
            latest_kind = ""
    return frozenset(names - {""})


def _is_new(op: Operation, tensor: SizedTensor, size: float, setup: Setup, storages: set[Storage]) -> bool:
    """Return whether no operation before saves this very tensor, nor is it the batch; add it to the storages."""
    name, coded = tensor.name(op), tensor.stored.name == "stash" or bool(tensor.packed_values)
    batch = name == BATCH and not coded and not setup.autocast  # which casts it
    exists = name and ((name, coded, int(size)) in storages or batch)
    storages.add((name, coded, int(size)))
    return not exists


# ---- the terms of an operation's memory


def _op_bytes(
    group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int], recompute: bool
) -> OpBytes:
    op = group.operation
    tensors = list(_ledger_tensors(group, setup, policy, widths))
    saved = tuple(tensor for tensor in _saved(op, tensors, setup, policy, widths) if _needed(op, tensor.stored))
    packed = [tensor for tensor in saved if tensor.packed]
    # x, which the operation before made
    entering = next((tensor for tensor in tensors if tensor.stored.written == BEFORE and tensor.nbytes), None)
    forward = _forward_bytes(op, tensors, packed)
    backward = _backward_bytes(op, tensors, packed, setup, policy, recompute)
    if not op.backward:  # nothing saves its input, and its temporary tensors exist while y is made
        forward, backward = forward + (entering.nbytes if entering else 0.0) + backward, 0.0
    return OpBytes(
        saved=saved,
        input=entering.nbytes if entering else 0.0,
        coded_input=_coded_input_bytes(entering, policy),
        shared_bias=sum(
            tensor.saved_nbytes for tensor in tensors if tensor.stored.shape == "bias" or op.kind == "fused bias"
        ),  # made once for all layers; masks exist from step to step
        forward_temporary=forward,
        backward_temporary=backward,
        gradients=op.parameters * STATE_BITS / 8 if op.trains and op.kind != "adam" else 0.0,
        result=sum(tensor.nbytes for tensor in tensors if tensor.stored.name in ("y", "logsumexp")),
    )


def _coded_input_bytes(entering: SizedTensor | None, policy: CostedPolicy | None) -> float:
    """Return min(bytes of x, values of x * code bits / 8): the input of a recomputed layer."""
    if not entering or not policy or entering.values <= MAX_EXACT_NUMEL:
        return entering.nbytes if entering else 0.0
    return min(entering.nbytes, entering.values * policy.code_bits("boundary") / 8)


def _forward_bytes(op: Operation, tensors: list[SizedTensor], packed: list[SizedTensor]) -> float:
    """Return sum(unpacked bytes of packed tensors) + y where nothing saves it + log p + a fused kernel's + all tensors
    of a loss made in chunks * min(1, CHUNK / rows)."""
    passing = sum(
        tensor.nbytes
        for tensor in tensors
        if tensor.stored.name == "log p" or (tensor.stored.name == "y" and not tensor.stored.saved)
    )
    if isinstance(op, Pointwise) and op.kind == "chunked loss":
        passing += sum(tensor.nbytes for tensor in tensors) * min(1, CHUNK / op.rows)
    return sum(tensor.nbytes for tensor in packed) + passing + _kernel_bytes(op)


def _kernel_bytes(op: Operation) -> float:
    """Return `score_bytes` for each of the M * K scores of a fused attention."""
    return op.score_bytes * op.batch * op.M * op.K if isinstance(op, Gemm) and op.on_chip == "x" else 0.0


def _backward_bytes(
    op: Operation,
    tensors: list[SizedTensor],
    packed: list[SizedTensor],
    setup: Setup,
    policy: CostedPolicy | None,
    recompute: bool,
) -> float:
    """Return dy + dx + 2 log p + gradients of copies (2 bytes a parameter, fp32 dx of the residual stream) + 16-bit
    operands + unpacked tensors, one at a time."""
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
    if isinstance(op, Gemm) and op.weight and op.weights == 1 and setup.autocast:  # gradients of autocast's copies
        passing += op.parameters * 2 + (op.M * op.K * STATE_BITS / 8 if op.stream else 0)
    return passing + _operand_bytes(op, setup) + unpacked + _kernel_bytes(op)


def _operand_bytes(op: Operation, setup: Setup) -> float:
    """Return M (K [the stash is codes] + N [dy is rounded]) container bits / 8: codes are multiplied as 16-bit copies,
    beside a dy in floating point as copies of the container."""
    rounded = not isinstance(setup.operands["dy_for_dw"], Identity)
    if not (isinstance(op, Gemm) and op.quantized and op.weight) or (rounded and setup.container_bits == WIDEST):
        return 0.0
    return op.M * (op.K * setup.stash.packs + op.N * rounded) * setup.container_bits / 8


# ---- an operation's tensors


def _ledger_tensors(
    group: Group, setup: Setup, policy: CostedPolicy | None, widths: dict[str, int]
) -> Iterator[SizedTensor]:
    op = group.operation
    for stored in tensors_of(group, setup):
        nbytes = float(stored.times * layout_bytes(group, stored, setup, widths))
        values = float(stored.times * prod(shape_of(group, stored)))
        tensor = _sized(op, stored, nbytes, values, policy)
        # autocast casts x for each product that reads it
        shared = isinstance(op, Gemm) and stored.name in ("x", "stash") and not (setup.autocast and op.stream)
        yield replace(tensor, is_input=shared)


def _sized(op: Operation, stored: Stored, nbytes: float, values: float, policy: CostedPolicy | None) -> SizedTensor:
    weight = stored.name == "w" and isinstance(op, Gemm) and op.weight  # autocast's copy
    category = Category.PARAMETERS if weight else Category.STASH if stored.width == "q1" else Category.ACTIVATIONS
    category = Category.LOGITS if op.kind in LOSSES else category
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
        copy = tensor.stored.width in ("q1", "cast")
        if copy or tensor.category is Category.PARAMETERS or {tensor.stored.name} - roles == {"logsumexp"}:
            yield tensor


def _unknown(op: Operation, trace: TracedTensor) -> Stored:
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
