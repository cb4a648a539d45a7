"""Memory of a training step: the ledger's tensors over their lifetimes.

Timeline: each operation of the forward keeps its `kept` tensors; the backward visits the operations in reverse order,
holds dy and dx, adds its parameters' gradients and frees what was kept; then the optimiser runs. PyTorch's allocator
rounds up and fragments, and libraries have workspaces: neither is counted.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from costmodel.model.entries import CATEGORIES, Category, LedgerEntry, Stash, entries_of
from costmodel.model.ledger import STATE_BITS
from costmodel.model.operations import ENCODER_OUT, Gemm, Workload
from costmodel.model.quantisation import Setup
from costmodel.model.traffic import widths_of
from dsq.formats import WIDEST

MOMENTS = 2
Rows = npt.NDArray[np.float64]


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

    def shared_by(self, stage: int) -> int:
        """How many devices share out what ZeRO does from this stage on: 1 the optimiser's state and its update, 2 the
        gradients, 3 the parameters."""
        return self.devices if self.zero >= stage else 1


@dataclass(frozen=True)
class Memory:
    """A step's memory: after each operation's forward, in its backward, and at the update."""

    operations: tuple[str, ...]  #: in order; the backward visits them in reverse
    bytes: Rows  #: a row a moment, a column a category
    saved: float  #: kept by the whole forward for the backward

    @cached_property
    def totals(self) -> Rows:
        """Bytes at each moment."""
        totals: Rows = self.bytes.sum(axis=1)
        return totals

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


def peak_memory(workload: Workload, method: Method) -> Memory:
    """The step's memory over time."""
    names, rows, left = _alone(workload, replace(method, name="", in_flight=1, zero=0, devices=1))
    rows = rows + state(workload, method)
    rows[len(names) : -1] += (method.in_flight - 1) * left
    rows[:, Category.GRADIENTS] /= method.shared_by(2)
    return Memory(names, rows, float(left.sum()))


@lru_cache(maxsize=256)
def _alone(workload: Workload, method: Method) -> tuple[tuple[str, ...], Rows, Rows]:
    """The operations, the bytes of a micro-batch on one device at each moment, and what its forward leaves."""
    entries = entries_of(workload, method.setup, method.stash, method.recompute)
    kept = np.array([entry.kept for entry in entries])
    entering = kept.copy()  # what the forward leaves of each
    starts = np.arange(len(entries))  # of each operation's layer, where the backward runs the layer again
    for index, entry in enumerate(entries):
        if method.recompute and entry.layer:
            entering[index] = 0
            entering[index, Category.ACTIVATIONS] = entry.entering
            if index and entry.layer == entries[index - 1].layer:
                starts[index] = starts[index - 1]
    none = np.zeros((1, len(CATEGORIES)))
    left, held = (np.concatenate([none, rows.cumsum(axis=0)]) for rows in (entering, kept))
    backward = left[starts] + held[1:] - held[starts]
    rows = np.concatenate([left[1:], backward[::-1], none])
    gradients = sum(entry.alike.gradients for entry in entries) * method.accumulates
    extra = [(gradients, entry.alike.made) for entry in entries] + _beside(entries, method, gradients)
    rows[:, Category.GRADIENTS], rows[:, Category.TEMPORARY] = np.array([*extra, (extra[-1][0], 0.0)]).T
    return tuple(entry.op.name for entry in entries), rows, left[-1]


def _beside(entries: list[LedgerEntry], method: Method, gradients: float) -> list[tuple[float, float]]:
    """Gradients of parameters, and what is there for a while, in each operation's backward, the last operation's
    first."""
    found = []
    new = waiting = stream = encoder_gradient = 0.0
    stream_bytes = float(widths_of(method.setup)["r"]) / 8
    outputs: dict[str, float] = defaultdict(float)  # what a recomputed layer put out is there until its end
    for entry in entries if method.recompute else ():
        outputs[entry.layer] = max(outputs[entry.layer], entry.alike.stream) if entry.layer else 0.0
    for entry in reversed(entries):
        op, alike = entry.op, entry.alike
        if op.name.startswith("encoder."):
            encoder_gradient = 0.0
        stream = alike.stream or stream  # the gradient that passes by the branch
        if isinstance(op, Gemm) or op.kind != "tied":  # there the gradient of the table still waits
            new = alike.gradients if method.accumulates else 0.0
        gradients += 0 if method.accumulates else alike.gradients
        beside = waiting + encoder_gradient + new + outputs[entry.layer] + (stream if entry.layer else 0.0)
        found.append((gradients, alike.temporary + beside))
        if isinstance(op, Gemm) and op.tied:  # waits for the gradient of the embedding
            waiting += op.K * op.N * STATE_BITS / 8
        if isinstance(op, Gemm) and op.input == ENCODER_OUT and not encoder_gradient:
            encoder_gradient = op.M * op.K * stream_bytes  # sums up until the encoder's backward
    return found


def saved_bytes(workload: Workload, setup: Setup) -> float:
    """What the whole model keeps from the forward for the backward, converted layers' stash included."""
    return sum(sum(entry.kept) for entry in entries_of(workload, setup))


def state(workload: Workload, method: Method) -> Rows:
    """Bytes that are there all the time, by category."""
    container = float(method.setup.container_bits)
    word = STATE_BITS / 8
    working = container / 8 if container < WIDEST and not method.setup.autocast else 0
    # the master weights go with the optimiser's state, where there is a working copy
    master = workload.trained * word / method.shared_by(1 if working else 3)
    rest = workload.trained * working + (workload.parameters - workload.trained) * (working or word)
    held = np.zeros(len(CATEGORIES))
    held[Category.PARAMETERS] = master + rest / method.shared_by(3)
    held[Category.OPTIMISER] = workload.trained * MOMENTS * word / method.shared_by(1)
    return held


def packed_values(workload: Workload, method: Method) -> list[float]:
    """Values of each tensor that the method's policy packs."""
    entries = entries_of(workload, method.setup, method.stash, method.recompute)
    return [values for entry in entries for values in entry.packed]
