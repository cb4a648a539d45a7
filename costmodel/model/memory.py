"""Memory of a training step: the ledger's tensors over their lifetimes.

Timeline: each operation of the forward keeps its `kept` tensors; the backward visits the operations in reverse order,
holds dy and dx, adds its parameters' gradients and frees what was kept; then the optimiser runs. PyTorch's allocator
rounds up and fragments, and libraries have workspaces: neither is counted.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from costmodel.model.ledger import BATCH, BEFORE, STATE_BITS, Stored
from costmodel.model.operations import CAST, ENCODER_OUT, Gemm, Group, Operation, Workload
from costmodel.model.quantisation import Bits, Setup
from costmodel.model.stash import Stash
from costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Identity

#: in the order of tables and pictures
CATEGORIES = ("parameters", "gradients", "optimiser", "activations", "stash", "logits", "temporary")
MOMENTS = 2
LOSSES = ("loss", "loss of fp32")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
#: what an operation's backward holds besides
_GRADIENTS = ("dy", "dx", "dx, df", "d gate, up", "their sum")

Bytes = dict[str, float]


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
class Moment:
    """Bytes by category at one operation of the step."""

    at: str  #: "forward of NAME", "backward of NAME" or "update"
    categories: Bytes

    @cached_property
    def total(self) -> float:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Memory:
    """A step's memory: at each operation, and where it is most."""

    timeline: tuple[Moment, ...]
    saved: float  #: kept by the whole forward for the backward

    @cached_property
    def most(self) -> Moment:
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def peak(self) -> float:
        return self.most.total

    @property
    def cause(self) -> str:
        return self.most.at

    @property
    def categories(self) -> Bytes:
        """At the peak, in whole bytes."""
        return {name: float(round(self.most.categories.get(name, 0.0))) for name in CATEGORIES}


@dataclass(frozen=True)
class _Kept:
    """A tensor that an operation keeps from the forward for the backward, as a policy may pack it."""

    stored: Stored
    category: str
    bytes: float
    packed: float  #: values that are packed; 0: kept as it is


@dataclass(frozen=True)
class _Alike:
    """Bytes that each operation of a group holds, whatever its neighbours keep already."""

    kept: tuple[_Kept, ...]
    first: float  #: of its first tensor, as a layer's input is kept
    entering: float  #: of the first tensor that was there before; 0: none was
    made: float  #: of y, while it is made
    temporary: float  #: that its backward holds besides
    gradients: float


@dataclass
class _Step:
    """One operation of the timeline."""

    op: Operation
    layer: str
    alike: _Alike
    kept: Bytes = field(default_factory=dict)
    entering: float = 0  #: what a recomputed layer keeps of this operation: the layer's input
    packed: list[float] = field(default_factory=list)  #: values of each tensor that is packed


def peak_memory(workload: Workload, method: Method) -> Memory:
    """The step's memory over time."""
    steps = _steps(workload, method.setup, method.stash, method.recompute)
    layers: dict[str, list[_Step]] = defaultdict(list)
    for step in steps:
        layers[step.layer].append(step)
    state = _state(workload, method)
    summed = 0.0 if not method.accumulates else sum(step.alike.gradients for step in steps)
    share = method.devices if method.zero >= 2 else 1
    timeline: list[Moment] = []
    held = dict(state)

    def note(at: str, temporary: float, gradients: float) -> None:
        timeline.append(Moment(at, held | {"gradients": gradients, "temporary": temporary}))

    for step in steps:
        if method.recompute and step.layer:
            _add(held, {"activations": step.entering})
        else:
            _add(held, step.kept)
        note(f"forward of {step.op.name}", step.alike.made, summed / share)
    saved = sum(held.values()) - sum(state.values())
    for name, size in held.items():
        held[name] = size + (method.in_flight - 1) * (size - state.get(name, 0.0))
    gradients, layer, new, waiting, stream, encoder_gradient = summed, "", 0.0, 0.0, 0.0, 0.0
    stream_bytes = float(widths_of(method.setup)["r"]) / 8
    stream_of = {name: max(_stream(step) for step in alike) for name, alike in layers.items()}
    for step in reversed(steps):
        if method.recompute and step.layer and step.layer != layer:  # the layer's forward again
            for other in layers[step.layer]:
                _add(held, other.kept)
                _add(held, {"activations": -other.entering})
        layer = step.layer
        output = stream_of[layer] if method.recompute and layer else 0.0  # what it put out is there until its end
        if step.op.name.startswith("encoder."):
            encoder_gradient = 0.0
        stream = _stream(step) or stream  # the gradient that passes by the branch
        if isinstance(step.op, Gemm) or step.op.kind != "tied":  # there the gradient of the table still waits
            new = step.alike.gradients if method.accumulates else 0.0
        gradients += 0 if method.accumulates else step.alike.gradients
        note(
            f"backward of {step.op.name}",
            step.alike.temporary + waiting + encoder_gradient + new + output + (stream if layer else 0.0),
            gradients / share,
        )
        if isinstance(step.op, Gemm) and step.op.tied:  # waits for the gradient of the embedding
            waiting += step.op.K * step.op.N * STATE_BITS / 8
        if isinstance(step.op, Gemm) and step.op.input == ENCODER_OUT and not encoder_gradient:
            encoder_gradient = step.op.M * step.op.K * stream_bytes  # sums up until the encoder's backward
        _add(held, step.kept, -1)
    timeline.append(Moment("update", state | {"gradients": gradients / share}))
    return Memory(tuple(timeline), saved)


def _stream(step: _Step) -> float:
    """Bytes of the residual stream, where this is a sum on it."""
    return 0.0 if isinstance(step.op, Gemm) or step.op.kind != "residual" else step.alike.made


def in_layer(op: Operation) -> bool:
    """Whether it belongs to one of the alike layers, which recomputation runs again."""
    return _LAYER.match(op.name) is not None


def saved_bytes(workload: Workload, setup: Setup) -> float:
    """What the whole model keeps from the forward for the backward, converted layers' stash included."""
    return sum(sum(step.kept.values()) for step in _steps(workload, setup))


def _state(workload: Workload, method: Method) -> Bytes:
    """What is there all the time."""
    container = float(method.setup.container_bits)
    word, share = STATE_BITS / 8, method.devices
    working = container / 8 if container < WIDEST and not method.setup.autocast else 0
    if method.zero:  # the master weights go with the optimiser's state, where there is a working copy
        master = workload.trained * word / share if working else workload.trained * word
    else:
        master = workload.trained * word
    frozen = (workload.parameters - workload.trained) * (working or word)
    copies = workload.trained * working
    if method.zero == 3:
        master, frozen, copies = workload.trained * word / share, frozen / share, copies / share
    moments = workload.trained * MOMENTS * word / (share if method.zero else 1)
    return {"parameters": master + frozen + copies, "optimiser": moments}


def packed_values(workload: Workload, method: Method) -> list[float]:
    """Values of each tensor that the method's policy packs."""
    steps = _steps(workload, method.setup, method.stash, method.recompute)
    return [values for step in steps for values in step.packed]


@lru_cache(maxsize=16)  # devices and ZeRO change nothing here
def _steps(workload: Workload, setup: Setup, policy: Stash | None = None, recompute: bool = False) -> list[_Step]:
    widths = widths_of(setup)
    made: dict[str, _Alike] = {}
    for group in workload.groups:
        made |= dict.fromkeys(group.names, _alike(group, setup, policy, widths))
    steps = []
    seen: set[tuple[str, str, int]] = set()
    entered: set[str] = set()
    for op in workload.operations:
        layer = _LAYER.match(op.name)
        step = _Step(op, layer[0] if layer else "", made[op.name])
        for kept in step.alike.kept:
            if _new(op, kept.stored, kept.bytes, seen, setup.autocast):
                _add(step.kept, {kept.category: kept.bytes})
                if kept.packed and not (recompute and step.layer):
                    step.packed.append(kept.packed)
        if step.layer and step.layer not in entered and step.alike.entering:
            entered.add(step.layer)
            step.entering = step.alike.entering
        if step.layer and isinstance(op, Gemm) and op.input == ENCODER_OUT and ENCODER_OUT not in entered:
            entered.add(ENCODER_OUT)  # what every layer of a decoder is given besides
            step.entering = step.alike.first
        steps.append(step)
    return steps


def _alike(group: Group, setup: Setup, policy: Stash | None, widths: dict[str, Bits]) -> _Alike:
    op = group.operation
    kept: list[_Kept] = []
    first = entering = made = temporary = packing = 0.0
    for index, stored in enumerate(tensors_of(group, setup)):
        plain = stored.times * float(layout_bytes(group, stored, setup, widths)[0])
        values = plain * 8 / (float(widths[stored.width]) or 1)
        size = policy.keeps(op, stored, plain, values) if policy and not stored.width.startswith("q") else plain
        first = first if index else size
        if stored.written == BEFORE and not entering:
            entering = size
        if stored.name == "y" and not stored.kept:
            made += plain
        if stored.name in _GRADIENTS and _category(op, stored) != "logits":
            temporary += plain
        if stored.name == "log p":  # its gradient, and that of the logits
            temporary += 2 * plain
            made += plain  # the logits
        if stored.kept:
            packed = policy is not None and size < plain
            kept.append(_Kept(stored, _category(op, stored), size, values if packed else 0))
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
    return _Alike(tuple(kept), first, entering, made + packing, temporary, gradients)


def _multiplies_copies(op: Gemm, setup: Setup) -> bool:
    """Codes are multiplied as floats: where tensors are 16 bits wide, copies of both operands beyond scratch memory."""
    return (
        op.quantised and op.weight and not isinstance(setup.format, Identity) and float(setup.container_bits) < WIDEST
    )


def _new(op: Operation, stored: Stored, size: float, seen: set[tuple[str, str, int]], autocast: bool) -> bool:
    """Whether no operation before keeps this very tensor: an x by its `input`, a y by its maker's name."""
    own = f"{op.name}.{stored.name}"
    name = own
    if stored.name == "y":
        name = op.name
    elif isinstance(op, Gemm):
        if stored.name == "x" and not (op.w_grad or op.on_chip):
            return False  # a frozen layer needs its weight alone
        if stored.name == "x" and op.input == BATCH and not autocast:
            return False  # there before the step
        if stored.name in ("x", "stash") and not (autocast and op.stream):  # autocast casts x for each that reads it
            name = op.input.removesuffix(CAST) or own
    key = ("packed" if stored.name.startswith("stash") else "", name, int(size))
    if key in seen:
        return False
    seen.add(key)
    return True


def _category(op: Operation, stored: Stored) -> str:
    if not isinstance(op, Gemm) and op.kind in LOSSES:
        return "logits"
    if stored.name == "w" and isinstance(op, Gemm) and op.weight:
        return "parameters"  # autocast's copy
    return "stash" if stored.width.startswith("q") else "activations"


def _add(total: Bytes, more: Bytes, sign: int = 1) -> None:
    for name, size in more.items():
        total[name] = total.get(name, 0.0) + sign * size
