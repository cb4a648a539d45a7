"""Peak memory of a training step: the ledger's tensors over their lifetimes.

Timeline: each operation of the forward keeps its `kept` tensors; the backward visits the operations in reverse order,
holds dy and dx, adds its parameters' gradients and frees what was kept. Parameters, gradients and Adam's moments are
fp32; where products read 16 bits, their working copy of the weights is there as well. PyTorch's allocator rounds up and
fragments, and libraries have workspaces: neither is counted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from costmodel.model.ledger import BEFORE, STATE_BITS, Stored
from costmodel.model.operations import Gemm, Group, Operation, Workload
from costmodel.model.quantisation import Setup
from costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.formats import WIDEST, Format

#: in the order of tables and pictures
CATEGORIES = ("parameters", "gradients", "optimiser", "activations", "stash", "logits", "temporary")
MOMENTS = 2
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
#: widths of kept tensors that a stash policy leaves as they are
_NOT_FLOATS = ("mask", "ids")

Bytes = dict[str, float]


@dataclass(frozen=True)
class Method:
    """A way to train: at a precision, with what is kept, over so many devices."""

    name: str
    setup: Setup
    stash: Format | None = None  #: every kept float is packed in this format (dsq.stash's bfp policy)
    recompute: bool = False  #: a layer keeps its input alone and runs its forward again
    zero: int = 0  #: 1: the optimiser's state is shared out, 2: and gradients, 3: and parameters
    devices: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes by category where the step holds most, and what it does there."""

    categories: Bytes
    cause: str  #: "backward of NAME" or "update"
    saved: float  #: kept by the whole forward for the backward

    @property
    def peak(self) -> float:
        return sum(self.categories.values())


@dataclass
class _Step:
    """One operation: what it keeps, and what its backward holds besides."""

    op: Operation
    layer: str
    kept: Bytes = field(default_factory=dict)
    boundary: float = 0  #: bytes of its x
    temporary: float = 0
    gradients: float = 0


def peak_memory(workload: Workload, method: Method) -> Memory:
    """Where the step holds most. Raises ValueError for a batch without operations to train."""
    steps = list(_steps(workload, method))
    state = _state(workload, method)
    remaining = _kept_after_forward(steps, method)
    saved = sum(remaining.values())
    share = method.devices if method.zero >= 2 else 1
    gradients, layer, best = 0.0, "", Memory({}, "", saved)
    for step in reversed(steps):
        if method.recompute and step.layer and step.layer != layer:  # the layer's forward again
            for other in steps:
                if other.layer == step.layer:
                    _add(remaining, other.kept)
        layer = step.layer
        gradients += step.gradients / share
        now = state | remaining | {"gradients": gradients, "temporary": step.temporary}
        if sum(now.values()) > best.peak:
            best = Memory(now, f"backward of {step.op.name}", saved)
        _add(remaining, step.kept, -1)
    update = state | {"gradients": gradients}
    if sum(update.values()) > best.peak:
        best = Memory(update, "update", saved)
    return Memory({name: best.categories.get(name, 0.0) for name in CATEGORIES}, best.cause, saved)


def saved_bytes(workload: Workload, setup: Setup) -> float:
    """What the whole model keeps from the forward for the backward, converted layers' stash included."""
    return sum(sum(step.kept.values()) for step in _steps(workload, Method("", setup)))


def _state(workload: Workload, method: Method) -> Bytes:
    """What is there all the time."""
    container = float(method.setup.container_bits)
    word, share = STATE_BITS / 8, method.devices
    working = container / 8 if container < WIDEST else 0
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


def _steps(workload: Workload, method: Method) -> Iterator[_Step]:
    widths = widths_of(method.setup)
    groups = {name: group for group in workload.groups for name in group.names}
    sizes: dict[tuple[int, str], float] = {}
    seen: set[tuple[str, str, int]] = set()

    def size(group: Group, stored: Stored) -> float:
        key = (id(group), stored.name)
        if key not in sizes:
            sizes[key] = stored.times * float(_stored_bytes(group, stored, method, widths))
        return sizes[key]

    for op in workload.operations:
        group = groups[op.name]
        layer = _LAYER.match(op.name)
        step = _Step(op, layer[0] if layer else "")
        for stored in tensors_of(group, method.setup):
            if stored.name in ("dy", "dx", "dx, df", "d gate, up") and _category(op, stored) != "logits":
                step.temporary += size(group, stored)
            if stored.name == "log p":  # its gradient, and that of the logits, both in fp32
                step.temporary += 2 * size(group, stored)
            if stored.written == BEFORE and not step.boundary:
                step.boundary = size(group, stored)
            if stored.kept and _new(op, stored, size(group, stored), seen):
                _add(step.kept, {_category(op, stored): size(group, stored)})
        if op.trains and getattr(op, "kind", "") != "adam":
            step.gradients = op.parameters * STATE_BITS / 8
        yield step


def _new(op: Operation, stored: Stored, size: float, seen: set[tuple[str, str, int]]) -> bool:
    """Whether no operation before keeps this very tensor: an x by its `input`, a y by its maker's name."""
    if isinstance(op, Gemm):
        if stored.name == "x" and not (op.w_grad or op.on_chip):
            return False  # a frozen layer needs its weight alone
        name = (op.input if stored.name in ("x", "stash") else "") or f"{op.name}.{stored.name}"
        name = op.name if stored.name == "y" else name
    else:
        name = op.name if stored.name == "y" else f"{op.name}.{stored.name}"
    key = ("packed" if stored.name.startswith("stash") else "", name, int(size))
    if key in seen:
        return False
    seen.add(key)
    return True


def _stored_bytes(group: Group, stored: Stored, method: Method, widths: dict[str, object]) -> float:
    packed = stored.width.startswith("q")
    if method.stash and stored.kept and not packed and stored.width not in _NOT_FLOATS and stored.shape != "rows":
        values = float(layout_bytes(group, stored, method.setup, widths)[0]) * 8 / float(str(widths[stored.width]))
        return values * (method.stash.bits + method.stash.scale_bits / (method.stash.box or values)) / 8
    return float(layout_bytes(group, stored, method.setup, widths)[0])


def _category(op: Operation, stored: Stored) -> str:
    if not isinstance(op, Gemm) and op.kind == "loss":
        return "logits"
    return "stash" if stored.width.startswith("q") else "activations"


def _kept_after_forward(steps: list[_Step], method: Method) -> Bytes:
    kept: Bytes = {}
    entered: set[str] = set()
    for step in steps:
        if method.recompute and step.layer:
            if step.layer not in entered:
                _add(kept, {"activations": step.boundary})
            entered.add(step.layer)
        else:
            _add(kept, step.kept)
    return kept


def _add(total: Bytes, more: Bytes, sign: int = 1) -> None:
    for name, size in more.items():
        total[name] = total.get(name, 0.0) + sign * size
