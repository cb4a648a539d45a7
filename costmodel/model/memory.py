"""Memory of a training step: the ledger's tensors over their lifetimes, without rounding, fragments and workspaces.

Each operation of the forward saves its tensors; the backward visits the operations in reverse order, holds dy
and dx, adds its parameters' gradients and frees what was saved; then the optimizer runs.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dsq.costmodel.model.entries import (
    CATEGORIES,
    Category,
    LedgerEntry,
    by_policy,
    entries_of,
    layer_of,
    saved_results,
)
from dsq.costmodel.model.ledger import STATE_BITS
from dsq.costmodel.model.methods import BF16, OPTIMIZERS, Method, Setup, Training
from dsq.costmodel.model.operations import ENCODER_OUT, Gemm, Operation, Workload
from dsq.costmodel.model.traffic import widths_of
from dsq.formats import WIDEST

Bytes = npt.NDArray[np.float64]
#: tensors of the residual stream's size that a layer's code names in its forward: its input, attention's result, the
#: sum of both, that sum's norm
FRAMES = 4


@dataclass(frozen=True)
class Memory:
    """A step's memory: after each operation's forward, in its backward, and at the update."""

    operations: tuple[str, ...]  #: in order; the backward visits them in reverse
    bytes: Bytes  #: a row a moment, a column a category
    saved: float  #: by the whole forward for the backward

    @cached_property
    def totals(self) -> Bytes:
        """Bytes at each moment."""
        return np.asarray(self.bytes.sum(axis=1))

    @cached_property
    def moment(self) -> int:
        """Index of the moment with most bytes."""
        return int(self.totals.argmax())

    @property
    def peak(self) -> float:
        return float(self.totals[self.moment])

    @property
    def cause(self) -> str:
        """The moment of the peak in words: "forward of NAME", "backward of NAME" or "update"."""
        forward = [f"forward of {name}" for name in self.operations]
        backward = [f"backward of {name}" for name in reversed(self.operations)]
        return [*forward, *backward, "update"][self.moment]

    @property
    def categories(self) -> dict[str, float]:
        """Bytes of each category at the peak, rounded."""
        return dict(zip(CATEGORIES, self.bytes[self.moment].round().tolist(), strict=True))


def peak_memory(workload: Workload, method: Method) -> Memory:
    """Return the step's memory over time."""
    shards = method.zero == 3 and method.devices > 1
    # FSDP's mixed precision casts all
    run = replace(method, setup=BF16) if shards and method.setup.autocast else method
    scatters = method.zero if method.devices > 1 else 0
    usual = vars(Training()) | {"zero": scatters, "base_bits": run.base_bits, "in_backward": run.in_backward}
    one_device = replace(run, name="", in_flight=1, trusted=True, **usual)
    names, rows, held = _alone(workload, one_device)
    rows = rows + state(workload, method)
    rows[len(names) : -1] += (method.in_flight - 1) * held
    rows[:, Category.GRADIENTS] *= gradient_bytes(method) / (STATE_BITS / 8) / method.shared_by(2)
    if method.devices > 1 and not method.zero:  # what DDP sums lies in buckets beside the gradients
        rows[:, Category.GRADIENTS] += workload.trained * gradient_bytes(method)
    if shards:
        rows[:-1, Category.PARAMETERS] += _gathered_bytes(workload, run)
        rows[len(names) : -1, Category.TEMPORARY] += _unscattered_bytes(by_policy(workload, method.stash), run)
    if method.foreach:
        rows[-1, Category.TEMPORARY] += update_copy(workload, method)
    return Memory(names, rows, float(held.sum()))


def update_copy(workload: Workload, method: Method) -> float:
    """Return the bytes that an update of AdamW adds unless it is fused: a copy of the device's share of a moment."""
    return workload.trained * OPTIMIZERS[method.optimizer].foreach / method.shared_by(1)


def has_master(method: Method) -> bool:
    """Return whether the weights that are updated are fp32."""
    return OPTIMIZERS[method.optimizer].master or method.setup.container_bits == WIDEST or method.setup.autocast


def gradient_bytes(method: Method) -> float:
    """Return the bytes of a parameter's gradient: as wide as the weights that are updated."""
    return STATE_BITS / 8 if has_master(method) else 2


def _gathered_bytes(workload: Workload, method: Method) -> float:
    """Return the bytes of weights that FSDP has gathered: those of no layer, and two layers'."""
    layers = defaultdict[str, float](float)
    for op in workload.operations:
        word = method.base_bits if is_base(op, method) else method.setup.container_bits
        layers[layer_of(op)] += op.parameters * word / 8
    return layers.pop("", 0.0) + sum(sorted(layers.values())[-2:])


def _unscattered_bytes(workload: Workload, method: Method) -> Bytes:
    """Return the bytes of gradients that FSDP has not scattered at each operation's backward: those of no layer, which
    wait for the end, the largest layer's, and its copy as wide as `gradient_bytes`, which is scattered while the
    backward of the next layer runs (torch/distributed/fsdp/_fully_shard: foreach_reduce and
    FSDPParamGroup.post_backward)."""
    word, moments = method.setup.container_bits / 8, []
    gradients = defaultdict[str, float](float, {"": 0.0})  # of each layer; "": of no layer
    for op in reversed(workload.operations):
        gradients[layer_of(op)] += op.parameters * op.trains
        moments.append((gradients[""], len(gradients) > 1))
    outside, in_layer = np.array(moments).T
    largest = max((size for layer, size in gradients.items() if layer), default=0.0)
    return np.asarray(outside * word + in_layer * largest * (word + gradient_bytes(method)))


@lru_cache(maxsize=256)
def _alone(workload: Workload, method: Method) -> tuple[tuple[str, ...], Bytes, Bytes]:
    """Return the operations, the bytes of a micro-batch on one device at each moment, and what its forward leaves."""
    entries = entries_of(workload, method.setup, method.stash, method.recompute)
    saved = np.array([entry.saved for entry in entries])
    entering = saved.copy()  # what the forward leaves of each
    starts = np.arange(len(entries))  # of each operation's layer, where the backward runs the layer again
    results = saved_results(workload) if method.selective else ()
    for index, entry in enumerate(entries):
        if method.recompute and entry.layer:
            entering[index] = 0
            entering[index, Category.ACTIVATIONS] = entry.layer_input + entry.op_bytes.result * (
                entry.op.name in results
            )
            if index and entry.layer == entries[index - 1].layer:
                starts[index] = starts[index - 1]
    none = np.zeros((1, len(CATEGORIES)))
    held, total = (np.concatenate([none, rows.cumsum(axis=0)]) for rows in (entering, saved))
    backward = held[starts] + total[1:] - total[starts]
    rows = np.concatenate([held[1:], backward[::-1], none])
    gradients = sum(entry.op_bytes.gradients for entry in entries) * method.accumulates
    # the 16-bit copy that a weight of few bits is multiplied as
    widened = np.array([2.0 * entry.op.parameters * is_base(entry.op, method) for entry in entries])
    sums = (entry.op_bytes.forward_temporary for entry in entries if method.stash and entry.op.kind == "residual")
    frames = FRAMES * max(sums, default=0.0)  # where nothing is packed, the graph holds these anyway
    extra = [(gradients, entry.op_bytes.forward_temporary + frames * bool(entry.layer)) for entry in entries]
    extra += _backward_moments(entries, method, gradients)
    rows[:, Category.GRADIENTS], rows[:, Category.TEMPORARY] = np.array([*extra, (extra[-1][0], 0.0)]).T
    rows[:-1, Category.TEMPORARY] += np.concatenate([widened, widened[::-1]])
    return tuple(entry.op.name for entry in entries), rows, held[-1]


def _backward_moments(entries: tuple[LedgerEntry, ...], method: Method, gradients: float) -> list[tuple[float, float]]:
    """Return the gradients of parameters, and what is there for a while, in each backward, the last operation's
    first."""
    moments = []
    gradient = waiting = stream = encoder_gradient = 0.0
    stream_bytes = float(widths_of(method.setup)["r"]) / 8
    for entry in reversed(entries):
        op, op_bytes = entry.op, entry.op_bytes
        if op.name.startswith("encoder."):
            encoder_gradient = 0.0
        if op.kind == "residual":
            stream = op_bytes.forward_temporary  # the gradient that passes by the branch
        if op.kind != "tied":  # there the gradient of the table still waits
            gradient = op_bytes.gradients if method.accumulates and method.zero < 2 else 0.0  # ZeRO-2 adds shards
        gradients = (0 if method.in_backward else gradients) + (0 if method.accumulates else op_bytes.gradients)
        concurrent = waiting + encoder_gradient + gradient + (stream if entry.layer else 0.0)
        moments.append((gradients, op_bytes.backward_temporary + concurrent))
        if isinstance(op, Gemm) and op.tied:  # waits for the gradient of the embedding
            word = method.setup.container_bits if method.zero == 3 else STATE_BITS  # FSDP's mixed precision
            waiting += op.K * op.N * word / 8
        if isinstance(op, Gemm) and op.input == ENCODER_OUT and not encoder_gradient:
            encoder_gradient = op.M * op.K * stream_bytes  # sums up until the encoder's backward
    return moments


def saved_bytes(workload: Workload, setup: Setup) -> float:
    """Return the bytes that the model saves for the backward, the stash of converted layers included."""
    return sum(sum(entry.saved) for entry in entries_of(workload, setup))


def is_base(op: Operation, method: Method) -> bool:
    """Return whether the operation is a frozen layer whose weight has few bits."""
    return bool(method.base_bits and isinstance(op, Gemm) and op.weight and not op.w_grad and layer_of(op))


def state(workload: Workload, method: Method) -> Bytes:
    """Return the bytes that are there all the time, by category."""
    container, word, optimizer = float(method.setup.container_bits), STATE_BITS / 8, OPTIMIZERS[method.optimizer]
    working = container / 8 if container < WIDEST and not method.setup.autocast else 0
    base = sum(op.parameters for op in workload.operations if is_base(op, method))
    frozen = (workload.parameters - workload.trained - base) * (working or word) + base * method.base_bits / 8
    share = 0 if method.offload else 1 / method.shared_by(1)
    # the master weights go with the optimizer's state, where there is a working copy
    master = workload.trained * word * has_master(method) * (share if working else 1 / method.shared_by(3))
    always = np.zeros(len(CATEGORIES))
    always[Category.PARAMETERS] = master + (workload.trained * working + frozen) / method.shared_by(3)
    always[Category.OPTIMIZER] = workload.trained * optimizer.state * share
    return always


def packed_values(workload: Workload, method: Method) -> tuple[list[float], list[float]]:
    """Return the values of each tensor that the method's policy packs, and of each that the backward recomputes."""
    entries = entries_of(workload, method.setup, method.stash, method.recompute)
    return [n for entry in entries for n in entry.packed], [n for entry in entries for n in entry.recomputed]
