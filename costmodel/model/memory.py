"""Memory of a training step: the ledger's tensors over their lifetimes.

Timeline: each operation of the forward keeps its `kept` tensors; the backward visits the operations in reverse order,
holds dy and dx, adds its parameters' gradients and frees what was kept; then the optimiser runs. PyTorch's allocator
rounds up and fragments, and libraries have workspaces: neither is counted.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from costmodel.model.ledger import BATCH, BEFORE, STATE_BITS, Stored
from costmodel.model.operations import CAST, ENCODER_OUT, Gemm, Group, Operation, Pointwise, Workload
from costmodel.model.quantisation import Bits, Setup
from costmodel.model.stash import Stash
from costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Identity

#: in the order of tables and pictures
CATEGORIES = ("parameters", "gradients", "optimiser", "activations", "stash", "logits", "temporary")
_PARAMETERS, _GRADIENTS, _OPTIMISER, _ACTIVATIONS, _, _, _TEMPORARY = range(len(CATEGORIES))
MOMENTS = 2
LOSSES = ("loss", "loss of fp32")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
#: what an operation's backward holds besides
_DURING_BACKWARD = ("dy", "dx", "dx, df", "d gate, up", "their sum")


@dataclass(frozen=True)
class Method:
    """A way to train: at a precision, with what is kept, over so many devices."""

    name: str
    setup: Setup
    stash: Stash | None = None  #: a policy of dsq.stash
    recompute: bool = False  #: a layer keeps its input alone and runs its forward again
    in_flight: int = 1  #: micro-batches whose forward is kept at once, by the first stage of a pipeline
    zero: int = 0  #: 1: the optimiser's state is shared out, 2: and gradients, 3: and parameters
    devices: int = 1
    accumulates: bool = False  #: gradients of earlier micro-batches are there, and each new one beside its sum


@dataclass(frozen=True)
class Memory:
    """A step's memory: after each operation's forward, in its backward, and at the update."""

    operations: tuple[str, ...]  #: in order; the backward visits them in reverse
    bytes: npt.NDArray[np.float64]  #: a row a moment, a column a category
    saved: float  #: kept by the whole forward for the backward

    @cached_property
    def totals(self) -> npt.NDArray[np.float64]:
        """Bytes at each moment."""
        return self.bytes.sum(axis=1)

    @cached_property
    def moment(self) -> int:
        """When it is most."""
        return int(self.totals.argmax())

    @property
    def peak(self) -> float:
        return float(self.totals[self.moment])

    @property
    def cause(self) -> str:
        """The moment of the peak in words: "forward of NAME", "backward of NAME" or "update"."""
        count = len(self.operations)
        if self.moment == 2 * count:
            return "update"
        if self.moment < count:
            return f"forward of {self.operations[self.moment]}"
        return f"backward of {self.operations[2 * count - 1 - self.moment]}"

    @property
    def categories(self) -> dict[str, float]:
        """At the peak, in whole bytes."""
        return dict(zip(CATEGORIES, self.bytes[self.moment].round().tolist(), strict=True))


@dataclass(frozen=True)
class _Kept:
    """A tensor that an operation keeps from the forward for the backward, as a policy may pack it."""

    category: int  #: its place in CATEGORIES
    bytes: float
    packed: float  #: values that are packed; 0: kept as it is
    known_by: str = ""  #: the operation's field that names it for others that keep it too; empty: none does
    coded: bool = False  #: it is a stash, which layers with that input share


@dataclass(frozen=True)
class _Alike:
    """Bytes that each operation of a group holds, whatever its neighbours keep already."""

    kept: tuple[_Kept, ...]
    entering: float  #: of the first tensor that was there before, as a layer's input is kept; 0: none was
    added: float  #: of a mask and bias, which every layer is given
    made: float  #: of y, while it is made
    temporary: float  #: that its backward holds besides
    gradients: float
    stream: float  #: of the residual stream, where this is a sum on it


@dataclass
class _Step:
    """One operation of the timeline."""

    op: Operation
    layer: str  #: that is recomputed; empty: it is in none
    alike: _Alike
    kept: list[float] = field(default_factory=lambda: [0.0] * len(CATEGORIES))
    entering: float = 0  #: what a recomputed layer keeps of this operation: what the layer is given
    packed: list[float] = field(default_factory=list)  #: values of each tensor that is packed


def peak_memory(workload: Workload, method: Method) -> Memory:
    """The step's memory over time."""
    steps = _steps(workload, method.setup, method.stash, method.recompute)
    count, state = len(steps), _state(workload, method)
    kept = np.array([step.kept for step in steps])
    entering = kept.copy()  # what the forward leaves of each
    starts = np.arange(count)  # of each operation's layer, where the backward runs the layer again
    for index, step in enumerate(steps):
        if step.layer:
            entering[index] = 0
            entering[index, _ACTIVATIONS] = step.entering
            if index and step.layer == steps[index - 1].layer:
                starts[index] = starts[index - 1]
    none = np.zeros((1, len(CATEGORIES)))
    left, held = (np.concatenate([none, rows.cumsum(axis=0)]) for rows in (entering, kept))
    forward = left[1:]
    backward = left[starts] + held[1:] - held[starts] + (method.in_flight - 1) * left[-1]
    rows = np.concatenate([forward, backward[::-1], none]) + state
    gradients = sum(step.alike.gradients for step in steps) * method.accumulates
    extra = [(gradients, step.alike.made) for step in steps] + _beside(steps, method, gradients)
    rows[:, _GRADIENTS], rows[:, _TEMPORARY] = np.array([*extra, (extra[-1][0], 0.0)]).T
    rows[:, _GRADIENTS] /= method.devices if method.zero >= 2 else 1
    return Memory(tuple(step.op.name for step in steps), rows, float(left[-1].sum()))


def _beside(steps: list[_Step], method: Method, gradients: float) -> list[tuple[float, float]]:
    """Gradients of parameters, and what is there for a while, in each operation's backward, the last operation's
    first."""
    found = []
    new = waiting = stream = encoder_gradient = 0.0
    stream_bytes = float(widths_of(method.setup)["r"]) / 8
    outputs: dict[str, float] = defaultdict(float)  # what a recomputed layer put out is there until its end
    for step in steps:
        if step.layer:
            outputs[step.layer] = max(outputs[step.layer], step.alike.stream)
    for step in reversed(steps):
        op, alike = step.op, step.alike
        if op.name.startswith("encoder."):
            encoder_gradient = 0.0
        stream = alike.stream or stream  # the gradient that passes by the branch
        if isinstance(op, Gemm) or op.kind != "tied":  # there the gradient of the table still waits
            new = alike.gradients if method.accumulates else 0.0
        gradients += 0 if method.accumulates else alike.gradients
        passing = stream if in_layer(op) else 0.0
        found.append(
            (gradients, alike.temporary + waiting + encoder_gradient + new + outputs.get(step.layer, 0.0) + passing)
        )
        if isinstance(op, Gemm) and op.tied:  # waits for the gradient of the embedding
            waiting += op.K * op.N * STATE_BITS / 8
        if isinstance(op, Gemm) and op.input == ENCODER_OUT and not encoder_gradient:
            encoder_gradient = op.M * op.K * stream_bytes  # sums up until the encoder's backward
    return found


@cache
def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else ""


def in_layer(op: Operation) -> bool:
    """Whether it belongs to one of the alike layers, which recomputation runs again."""
    return bool(_layer(op.name))


def saved_bytes(workload: Workload, setup: Setup) -> float:
    """What the whole model keeps from the forward for the backward, converted layers' stash included."""
    return sum(sum(step.kept) for step in _steps(workload, setup))


def _state(workload: Workload, method: Method) -> npt.NDArray[np.float64]:
    """What is there all the time, by category."""
    container = float(method.setup.container_bits)
    word, share = STATE_BITS / 8, method.devices
    working = container / 8 if container < WIDEST and not method.setup.autocast else 0
    # the master weights go with the optimiser's state, where there is a working copy
    master = workload.trained * word / (share if method.zero == 3 or (method.zero and working) else 1)
    rest = workload.trained * working + (workload.parameters - workload.trained) * (working or word)
    state = np.zeros(len(CATEGORIES))
    state[_PARAMETERS] = master + rest / (share if method.zero == 3 else 1)
    state[_OPTIMISER] = workload.trained * MOMENTS * word / (share if method.zero else 1)
    return state


def packed_values(workload: Workload, method: Method) -> list[float]:
    """Values of each tensor that the method's policy packs."""
    steps = _steps(workload, method.setup, method.stash, method.recompute)
    return [values for step in steps for values in step.packed]


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def _steps(workload: Workload, setup: Setup, policy: Stash | None = None, recompute: bool = False) -> list[_Step]:
    widths = widths_of(setup)
    if recompute:
        workload = workload.recomputing_layers()
    alike: dict[str, _Alike] = {}
    for group in workload.groups:
        alike |= dict.fromkeys(group.names, _alike(group, setup, policy, widths))
    steps = []
    seen: set[tuple[object, ...]] = set() if setup.autocast else {(False, BATCH)}  # the batch is there before the step
    for op in workload.operations:
        step = _Step(op, _layer(op.name) if recompute else "", alike[op.name])
        for kept in step.alike.kept:
            if _new(op, kept, seen):
                step.kept[kept.category] += kept.bytes
                if kept.packed and not step.layer:
                    step.packed.append(kept.packed)
        for what, size in _given(step) if step.layer else ():
            if size and what not in seen:
                seen.add(what)
                step.entering += size
        steps.append(step)
    return steps


def _given(step: _Step) -> Iterator[tuple[tuple[object, ...], float]]:
    """What a recomputed layer keeps that reaches it at this operation: its own input, and what all layers of the stack
    are given, the encoder's output, a mask and bias; each with a name."""
    stack = step.layer.partition(".")[0]
    yield (step.layer,), step.alike.entering
    yield (stack, "added", step.alike.added), step.alike.added
    if isinstance(step.op, Gemm) and step.op.input == ENCODER_OUT:
        yield (stack, ENCODER_OUT), step.alike.entering


def _new(op: Operation, kept: _Kept, seen: set[tuple[object, ...]]) -> bool:
    """Whether no operation before keeps this very tensor: an x by its `input`, a y by its maker's name."""
    name = kept.known_by and getattr(op, kept.known_by).removesuffix(CAST)
    if not name:
        return True
    key = (kept.coded, name, int(kept.bytes))
    there = key in seen or key[:2] in seen
    seen.add(key)
    return not there


def _alike(group: Group, setup: Setup, policy: Stash | None, widths: dict[str, Bits]) -> _Alike:
    op = group.operation
    kept: list[_Kept] = []
    entering = added = made = temporary = packing = 0.0
    for stored in tensors_of(group, setup):
        plain = stored.times * float(layout_bytes(group, stored, setup, widths)[0])
        values = plain * 8 / (float(widths[stored.width]) or 1)
        category = _category(op, stored)
        size = policy.keeps(op, stored, plain, values) if policy and category != "stash" else plain
        if stored.written == BEFORE:
            entering = entering or size
        added += size if stored.shape in ("mask", "bias") else 0
        if stored.name == "y" and not stored.kept:
            made += plain
        if stored.name in _DURING_BACKWARD and category != "logits":
            temporary += plain
        if stored.name == "log p":  # its gradient, and that of the logits
            temporary += 2 * plain
            made += plain  # the logits
        if stored.kept and _needed(op, stored):
            packed = size < plain
            known_by = _known_by(op, stored, setup.autocast)
            kept.append(
                _Kept(CATEGORIES.index(category), size, values if packed else 0, known_by, stored.name == "stash")
            )
            if policy and packed:
                temporary += plain / stored.times  # unpacked
                made += plain
                packing = max(packing, policy.packing_bytes(values))
    if isinstance(op, Gemm) and op.weight and op.weights == 1 and setup.autocast:  # the gradients of its copies
        temporary += op.parameters * 2 + (op.M * op.K * STATE_BITS / 8 if op.stream else 0)
    if isinstance(op, Gemm) and _multiplies_copies(op, setup):
        temporary += op.M * (op.K + op.N) * float(setup.container_bits) / 8
    updated = op.trains and getattr(op, "kind", "") != "adam"
    gradients = op.parameters * STATE_BITS / 8 if updated else 0.0
    stream = made if isinstance(op, Pointwise) and op.kind == "residual" else 0.0
    return _Alike(tuple(kept), entering, added, made + packing, temporary, gradients, stream)


def _multiplies_copies(op: Gemm, setup: Setup) -> bool:
    """Codes are multiplied as floats: where tensors are 16 bits wide, copies of both operands beyond scratch memory."""
    return (
        op.quantised and op.weight and not isinstance(setup.format, Identity) and float(setup.container_bits) < WIDEST
    )


def _needed(op: Operation, stored: Stored) -> bool:
    """A frozen layer needs its weight alone."""
    return not (isinstance(op, Gemm) and stored.name == "x" and not (op.w_grad or op.on_chip))


def _known_by(op: Operation, stored: Stored, autocast: bool) -> str:
    if stored.name == "y":
        return "name"
    shared = isinstance(op, Gemm) and stored.name in ("x", "stash")
    return "input" if shared and not (autocast and op.stream) else ""  # autocast casts x for each that reads it


def _category(op: Operation, stored: Stored) -> str:
    if not isinstance(op, Gemm) and op.kind in LOSSES:
        return "logits"
    if stored.name == "w" and isinstance(op, Gemm) and op.weight:
        return "parameters"  # autocast's copy
    return "stash" if stored.width.startswith("q") else "activations"
