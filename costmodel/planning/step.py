"""How long a step takes: what it computes, packs, updates and sends; on one device, over data-parallel ones (ZeRO),
tensor-parallel ones (with sequence parallelism) and a pipeline of stages (1F1B)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from dsq.command import read_toml
from dsq.costmodel.hardware.hardware import Hardware, Pass
from dsq.costmodel.model.entries import by_policy, layer_of, saved_results
from dsq.costmodel.model.ledger import BACKWARD, FORWARD, STATE_BITS, UPDATE
from dsq.costmodel.model.memory import Memory, gradient_bytes, is_base, packed_values, peak_memory, state
from dsq.costmodel.model.methods import BF16, FOREACH_TRAFFIC, OPTIMIZERS, CostedPolicy, Method
from dsq.costmodel.model.operations import Operation, Workload
from dsq.costmodel.model.roofline import step_floor, traffic_of
from dsq.costmodel.model.traffic import matmuls
from dsq.costmodel.workloads.transformer import Shard

#: kind of training -> the least and the most time that is printed, as multiples of what is expected
RANGES: dict[str, tuple[float, float]] = {
    kind: (float(bounds["low"]), float(bounds["high"]))
    for kind, bounds in read_toml(Path(__file__).with_name("ranges.toml")).items()
}
#: seconds of a step in which Python launches the kernels of a layer, and more of them for each of its converted linear
#: layers, packed or recomputed tensors, and its checkpoint: GPT-2's 33, 86, 154 and 61 ms beside an H100
#: (analysis/results/gpu_steps.csv). The 298 ms of 1.3 billion parameters, all packed, are given as 309
HOST_PER_LAYER, HOST_PER_LINEAR, HOST_PER_TENSOR, HOST_PER_CHECKPOINT = 2.77e-3, 1.09e-3, 0.56e-3, 2.29e-3
WHOLE = Shard()  #: a model that each device has all of
_TIMED_BITS = 4  #: of the code that `calibrate` packs, which takes as long as others


@dataclass(frozen=True)
class StepTime:
    """A step's expected time on each device, in seconds. All but `launching` and `launched` are a GPU's own."""

    compute: float  #: forward and backward: the roofline's floor, recomputation included
    packing: float  #: packing and unpacking of what a policy keeps; 0: it packs nothing
    packing_measured: bool  #: or nothing is packed
    update: float  #: the optimizer's, of the device's share if ZeRO shares it out
    communication: float  #: sending, by itself
    exposed: float  #: the part of it that the step waits for
    bound: str
    waiting: float  #: share of what the device's kernels take, forward, backward and update, that they wait for DRAM
    paging: float = 0  #: the update, where it takes as long as its state on the way over the host's link; else 0
    launching: float = 0  #: least time of a step that Python launches kernel by kernel
    low: float = 1  #: most such steps take between low and high times `launched`: see ranges.toml
    high: float = 1

    @property
    def seconds(self) -> float:
        """The time that is expected of CUDA graphs."""
        return self.compute + self.packing + self.update + self.exposed

    @property
    def shares(self) -> dict[str, float]:
        """The shares of ``seconds`` by what the step waits for."""
        kernels = self.compute + self.update - self.paging
        parts = {
            "arithmetic": (1 - self.waiting) * kernels,
            "DRAM": self.waiting * kernels + self.packing,
            "links between devices": self.exposed,
            "the host's link": self.paging,
        }
        return {name: part / self.seconds for name, part in parts.items()}

    @property
    def launched(self) -> float:
        """The time that is expected where Python launches the kernels."""
        return max(self.seconds, self.launching)


def step_time(
    workload: Workload, method: Method, hardware: Hardware, micro_batches: int = 1, shard: Shard = WHOLE
) -> StepTime:
    """Return the time of a step of so many batches on each device, whose model a shard's devices share, by themselves:
    without what these send one another."""
    setup = BF16 if method.zero == 3 and method.setup.autocast else method.setup  # FSDP's mixed precision casts all
    method, workload = replace(method, setup=setup), by_policy(workload, method.stash)
    low, high = RANGES[kind_of(method, hardware, shard.devices)]
    if method.compiled:
        hardware = replace(hardware, efficiency=replace(hardware.efficiency, fused=True, launch=0))
    moved, container = traffic_of(workload, method.setup, hardware), method.setup.container_bits
    products = matmuls(workload, method.setup)
    passes = step_floor([t for t in moved if t.phase != UPDATE], products, hardware, container)
    update = step_floor([t for t in moved if t.phase == UPDATE], [], hardware, container)
    share = OPTIMIZERS[method.optimizer].traffic * FOREACH_TRAFFIC**method.foreach / method.shared_by(1)
    # the state's way to the host's memory and back, both ways at once
    paging = offloaded_bytes(workload, method) / hardware.host if method.offload else 0.0
    if paging <= share * update.seconds:
        paging = 0.0
    # 16-bit weights are made of those of few bits in each forward and backward: what their bytes take
    widened = sum(op.parameters for op in workload.operations if is_base(op, method)) * (method.base_bits / 8 + 2)
    seconds = float(passes.seconds) + (2 + method.recompute) * hardware.moving(widened)
    if method.recompute:
        seconds += _forward_again(workload, method, hardware, filter(layer_of, workload.operations))
    if method.stash and method.stash.bits:  # which keeps no result of fused attention, and runs it again
        fused = [gemm for gemm in workload.gemms if gemm.on_chip and not gemm.weight]
        seconds += _forward_again(workload, method, hardware, fused)
    updating = paging or share * update.seconds
    kernels, waits = micro_batches * passes.seconds, micro_batches * passes.waiting_seconds
    if not paging:
        kernels, waits = kernels + updating, waits + share * update.waiting_seconds
    seconds *= micro_batches
    sending = sending_seconds(workload, method, hardware, micro_batches, shard.tensor)
    packing = micro_batches * packing_seconds(workload, method, hardware)
    exposed = max(sending - seconds, 0.0) + hardware.efficiency.exposed * min(sending, seconds)
    launches = hardware.efficiency.launch and not hardware.cpu
    launching = micro_batches * launching_seconds(workload, method) if launches else 0.0
    bounds = {
        "host": launching > seconds + packing + updating + exposed,
        "link": sending > seconds + packing + updating,
        "host link": 2 * paging > seconds + packing + updating + exposed,
        "memory": 2 * waits >= kernels,
        "compute": True,
    }
    return StepTime(
        compute=seconds,
        packing=packing,
        packing_measured=not method.stash or bool(_packing(method.stash, hardware)),
        update=updating,
        communication=sending,
        exposed=exposed,
        bound=next(name for name, holds in bounds.items() if holds),
        waiting=waits / kernels,
        paging=paging,
        launching=launching,
        low=low,
        high=high,
    )


def launching_seconds(workload: Workload, method: Method) -> float:
    """Return the least time of a micro-batch that Python launches kernel by kernel.

    (HOST_PER_LAYER + HOST_PER_CHECKPOINT, if layers recompute) * layers + HOST_PER_LINEAR * converted linear layers
    + HOST_PER_TENSOR * packed and recomputed tensors.
    """
    linears = sum(gemm.quantized and gemm.weight for gemm in workload.gemms) * bool(method.setup.mode)
    tensors = sum(map(len, packed_values(workload, method))) if method.stash else 0
    layers = len({layer_of(op) for op in workload.operations} - {""})
    per_layer = HOST_PER_LAYER + HOST_PER_CHECKPOINT * method.recompute
    return per_layer * layers + HOST_PER_LINEAR * linears + HOST_PER_TENSOR * tensors


def kind_of(method: Method, hardware: Hardware, shards: int = 1) -> str:
    """Return the kind of a training, a key of RANGES: errors of the predicted time are alike in each. shards: devices
    that share a model."""
    kinds = {
        "measured": hardware.measured,
        "roofline": hardware.efficiency.overlaps,
        "compiled": method.compiled,
        "GDDR": hardware.memory_type.startswith("GDDR"),
        "several nodes": _nodes(method.devices * shards, hardware) > 1,
        "eager": True,
    }
    return next(kind for kind, holds in kinds.items() if holds)


def offloaded_bytes(workload: Workload, method: Method) -> float:
    """Return the bytes of a device's optimizer and master weights in the host's memory."""
    return float((state(workload, replace(method, offload=False)) - state(workload, method)).sum())


def sending_seconds(
    workload: Workload, method: Method, hardware: Hardware, micro_batches: int = 1, tensor: int = 1
) -> float:
    """Return the time of what data-parallel devices send in a step, by itself: rings of all devices, a message a layer.
    Its bytes take the slower of the link inside a node and the network between nodes; its hops take a latency each.
    Devices that share a layer lie side by side, each in a ring of its own, and the rings share the network."""
    if method.devices == 1:
        return 0.0
    sent = communication_bytes(workload, method, micro_batches)
    nodes = min(method.devices, _nodes(method.devices * tensor, hardware))
    rings = min(tensor, hardware.node or tensor)  # that leave a node
    slowest = min(hardware.link, hardware.network / rings) if nodes > 1 else hardware.link
    layers = len({layer for op in workload.operations if (layer := layer_of(op))}) + 1
    rounds = 3 if method.zero == 3 else 2  # two gathers and a scatter; or a scatter and a gather
    messages = rounds * layers * (micro_batches if method.zero >= 2 else 1)
    between = messages * (nodes - 1)
    inside = messages * (method.devices - 1) - between
    return sent / slowest + inside * hardware.efficiency.hop + between * hardware.efficiency.hop_between_nodes


def _nodes(devices: int, hardware: Hardware) -> int:
    return -(-devices // hardware.node) if hardware.node else 1


def packing_seconds(workload: Workload, method: Method, hardware: Hardware) -> float:
    """Return the time of packing what the method's policy saves, of unpacking it, and of recomputing what other
    operations read.

    As measured (recomputing takes what unpacking takes), else what their bytes take.
    """
    if not method.stash:
        return 0.0
    (packed, recomputed), measured = packed_values(workload, method), _packing(method.stash, hardware)
    if measured:
        pack, unpack = measured
        return sum(pack.seconds(size) for size in packed) + sum(unpack.seconds(size) for size in packed + recomputed)
    container = float(method.setup.container_bits)
    moved = sum(packed) * (container + min(container, method.stash.code_bits("linear"))) + sum(recomputed) * container
    return 2 * max(hardware.moving(moved / 8), (len(packed) + len(recomputed) / 2) * hardware.efficiency.launch)


def _packing(stash: CostedPolicy, hardware: Hardware) -> list[Pass]:
    """Return the passes of packing and unpacking as `calibrate` measured them; empty: it did not, or the policy does
    more."""
    if not (stash.bits and stash.format and stash.ratio == 1):
        return []
    keys = (("pack", _TIMED_BITS, phase) for phase in (FORWARD, BACKWARD))
    return [hardware.passes[key] for key in keys if key in hardware.passes]


def _forward_again(workload: Workload, method: Method, hardware: Hardware, operations: Iterable[Operation]) -> float:
    """Return the seconds of the forward of these operations, but for those whose results selective recomputation
    keeps."""
    results = saved_results(workload) if method.selective else ()
    second = replace(workload, operations=tuple(op for op in operations if op.name not in results))
    moved = [t for t in traffic_of(second, method.setup, hardware) if t.phase == FORWARD]
    multiplied = [product for product in matmuls(second, method.setup) if product.name == "forward"]
    return float(step_floor(moved, multiplied, hardware, method.setup.container_bits).seconds)


def communication_bytes(workload: Workload, method: Method, micro_batches: int = 1) -> float:
    """Return the bytes that a device sends in a step (Rajbhandari et al., 2020, section 7).

    Without ZeRO gradients are summed in a ring, 2 (N-1)/N of them. ZeRO-1 and 2 scatter gradients and gather the
    weights that were updated, ZeRO-3 all weights before the forward and before the backward. Under autocast weights
    are fp32 up to ZeRO-2; FSDP's mixed precision, ZeRO-3, gathers 16 bits, and weights of few bits as they are.
    Tensors that no device has whole are sent for each micro-batch: gradients under ZeRO-2 and 3, weights under ZeRO-3.
    """
    part = (method.devices - 1) / method.devices
    gradients = workload.trained * gradient_bytes(method) * (micro_batches if method.zero >= 2 else 1)
    if not method.zero:
        return 2 * part * gradients
    whole = method.setup.autocast and method.zero < 3  # FSDP's mixed precision gathers what it casts
    word = (STATE_BITS if whole else float(method.setup.container_bits)) / 8
    if method.zero < 3:
        return part * (gradients + word * workload.trained)
    base = sum(op.parameters for op in workload.operations if is_base(op, method))
    gathered = word * (workload.parameters - base) + base * method.base_bits / 8
    return part * (gradients + 2 * micro_batches * gathered)


# ---- what tensor parallelism and a pipeline send, which does not overlap with what is computed

Stages = tuple[Workload, ...]  #: a device's operations of one micro-batch, of the first and the last stage
#: layers whose output tensor parallelism sums over the devices
_ROW_PARALLEL = ("out_proj", "down_proj", "fc2")


def sharded_step(stages: Stages, method: Method, shard: Shard, micro_batches: int, hardware: Hardware) -> StepTime:
    """Return the time of a step: of the slowest stage."""
    slowest = max(
        (step_time(stage, method, hardware, micro_batches, shard) for stage in stages), key=lambda step: step.seconds
    )
    if shard.devices == 1:
        return slowest
    # 1F1B: the time of so many micro-batches stands idle (Narayanan et al., 2021, section 2.2)
    busy = 1 + (shard.pipeline - 1) / micro_batches
    link = min(hardware.link, hardware.network) if _nodes(shard.tensor, hardware) > 1 else hardware.link
    inside = micro_batches * busy * max(sent_inside(stage, shard, method) for stage in stages) / link
    return replace(
        slowest,
        compute=busy * slowest.compute,
        packing=busy * slowest.packing,
        communication=slowest.communication + inside,
        exposed=slowest.exposed + inside,
        bound="link" if slowest.exposed + inside > busy * slowest.compute else slowest.bound,
    )


def sharded_memory(stages: Stages, method: Method, shard: Shard, micro_batches: int) -> Memory:
    """Return the memory of the device that holds most: the first stage keeps as many micro-batches as the pipeline is
    long."""
    in_flight = [min(shard.pipeline, micro_batches), 1]
    methods = (replace(method, in_flight=count, accumulates=micro_batches > 1) for count in in_flight)
    return max(map(peak_memory, stages, methods), key=lambda memory: memory.peak)


@lru_cache(maxsize=4096)
def sharded_peak(stages: Stages, method: Method, shard: Shard, micro_batches: int) -> float:
    """Return the peak of that device, which plans of several cards have in common."""
    return sharded_memory(stages, method, shard, micro_batches).peak


def sent_bytes(stages: Stages, method: Method, shard: Shard, micro_batches: int) -> float:
    """Return the bytes that a device sends in a step, among data-parallel ones and inside its model."""
    return max(
        communication_bytes(stage, method, micro_batches) + micro_batches * sent_inside(stage, shard, method)
        for stage in stages
    )


@lru_cache(maxsize=64)
def sent_inside(stage: Workload, shard: Shard, method: Method) -> float:
    """Return the bytes that a device sends for a micro-batch: sums of activations, 2 (t-1)/t of each in the forward and
    again in the backward (sequence parallelism scatters and gathers as much), and what passes between stages, both
    ways."""
    bits = float(method.setup.container_bits)
    rows = [op for op in stage.gemms if layer_of(op) and op.name.endswith(_ROW_PARALLEL)]
    summed = sum(op.M * op.N for op in rows) * bits / 8
    between = min((op.M * op.N for op in rows), default=0) * bits / 8  # experts have a row for each that was chosen
    part = (shard.tensor - 1) / shard.tensor
    return 2 * 2 * part * summed + (2 * between / shard.tensor if shard.pipeline > 1 else 0.0)
