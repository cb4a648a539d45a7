"""A step over several devices: data parallel with ZeRO, tensor parallel with sequence parallelism, and a pipeline of
stages (1F1B). What tensor parallelism and a pipeline send does not overlap with what is computed."""

from dataclasses import replace
from functools import lru_cache

from costmodel.hardware.hardware import Hardware
from costmodel.model.entries import in_layer
from costmodel.model.memory import Memory, Method, peak_memory
from costmodel.model.operations import Workload
from costmodel.planning.step import Step, step_time
from costmodel.workloads.shard import Shard

Stages = tuple[Workload, ...]  #: a device's operations of one micro-batch, of the first and the last stage
#: layers whose output tensor parallelism sums over the devices
_ROW_PARALLEL = ("out_proj", "down_proj", "fc2")


def sharded_step(stages: Stages, method: Method, shard: Shard, micro_batches: int, hardware: Hardware) -> Step:
    """Time of a step: of the slowest stage. Raises ValueError where several devices have no link."""
    slowest = max((step_time(stage, method, hardware, micro_batches) for stage in stages), key=lambda it: it.seconds)
    if shard.devices == 1:
        return slowest
    if not hardware.link:
        raise ValueError(f"hardware {hardware.name!r} states no link: several devices need [link] gb_per_s in its file")
    # 1F1B: the time of so many micro-batches stands idle (Narayanan et al., 2021, section 2.2)
    busy = 1 + (shard.pipeline - 1) / micro_batches
    inside = micro_batches * busy * max(sent_inside(stage, shard, method) for stage in stages) / hardware.link
    bound = "link" if slowest.exposed + inside > busy * slowest.compute else slowest.bound
    slowest = replace(slowest, compute=busy * slowest.compute, packing=busy * slowest.packing, bound=bound)
    return replace(slowest, communication=slowest.communication + inside, exposed=slowest.exposed + inside)


def sharded_memory(stages: Stages, method: Method, shard: Shard, micro_batches: int) -> Memory:
    """Memory of the device that holds most: the first stage keeps as many micro-batches as the pipeline is long."""
    in_flight = [min(shard.pipeline, micro_batches), 1]
    memories = [
        peak_memory(stage, replace(method, in_flight=kept, accumulates=micro_batches > 1))
        for stage, kept in zip(stages, in_flight, strict=False)
    ]
    return max(memories, key=lambda memory: memory.peak)


@lru_cache(maxsize=64)
def sent_inside(stage: Workload, shard: Shard, method: Method) -> float:
    """Bytes that a device sends for a micro-batch: sums of activations, 2 (t-1)/t of each in the forward and again in
    the backward (sequence parallelism scatters and gathers as much), and what passes between stages, both ways."""
    bits = float(method.setup.container_bits)
    rows = [op for op in stage.gemms if in_layer(op) and op.name.endswith(_ROW_PARALLEL)]
    summed = sum(op.M * op.N for op in rows) * bits / 8
    between = min((op.M * op.N for op in rows), default=0) * bits / 8  # experts have a row for each that was chosen
    part = (shard.tensor - 1) / shard.tensor
    return 2 * 2 * part * summed + (2 * between / shard.tensor if shard.pipeline > 1 else 0.0)
