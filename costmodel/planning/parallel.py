"""A step over several devices: data parallel with ZeRO, tensor parallel with or without sequence parallelism, and a
pipeline of stages (1F1B). Nothing that is sent overlaps with what is computed."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from costmodel.hardware.hardware import Hardware
from costmodel.model.entries import in_layer
from costmodel.model.memory import Memory, Method, peak_memory
from costmodel.model.operations import Workload
from costmodel.planning.step import communication_bytes, step_time
from costmodel.workloads.shard import Shard

#: layers whose output tensor parallelism sums over the devices
_ROW_PARALLEL = ("out_proj", "down_proj", "fc2")


@dataclass(frozen=True)
class Parallelism:
    """How devices train: `method` says precision, stash, ZeRO and how many devices have each part of the model."""

    method: Method
    shard: Shard
    micro_batches: int = 1  #: of a step, on each data-parallel device

    @property
    def devices(self) -> int:
        return self.method.devices * self.shard.devices

    def __str__(self) -> str:
        data = f"DP {self.method.devices}" if self.method.devices > 1 else ""
        zero = f"ZeRO-{self.method.zero}" if self.method.zero else ""
        return " ".join(part for part in (data, zero, str(self.shard)) if part) or "one device"


@dataclass(frozen=True)
class Plan:
    """What a parallelism takes: figures of the device that holds, or works, most."""

    parallelism: Parallelism
    stages: tuple[Workload, ...]  #: a device's operations of one micro-batch, of the first and the last stage
    seconds: float
    sent: float  #: bytes that a device sends in a step

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        step = self.stages[0].tokens * self.parallelism.micro_batches * self.parallelism.method.devices
        return step / self.seconds

    @property
    def device_seconds(self) -> float:
        """A million tokens' cost."""
        return 1e6 * self.parallelism.devices / self.tokens_per_second

    @cached_property
    def memory(self) -> Memory:
        micro = self.parallelism.micro_batches
        in_flight = [min(self.parallelism.shard.pipeline, micro), 1]
        memories = [
            peak_memory(stage, replace(self.parallelism.method, in_flight=kept, accumulates=micro > 1))
            for stage, kept in zip(self.stages, in_flight, strict=False)
        ]
        return max(memories, key=lambda memory: memory.peak)


@dataclass(frozen=True)
class StageTime:
    """Of the slowest stage by itself, in seconds."""

    micro_batch: float
    update: float  #: of all that the stage trains, once a step


def stage_time(stages: tuple[Workload, ...], method: Method, hardware: Hardware) -> StageTime:
    alone = [step_time(stage, replace(method, devices=1, zero=0), hardware) for stage in stages]
    return StageTime(max(step.compute + step.packing for step in alone), max(step.update for step in alone))


def plan(stages: tuple[Workload, ...], parallelism: Parallelism, link: float, alone: StageTime) -> Plan:
    """What a step takes and sends. link: bytes a second to the other devices. alone: `stage_time` of the stages.
    Raises ValueError where several devices have no link."""
    method, shard, micro = parallelism.method, parallelism.shard, parallelism.micro_batches
    if parallelism.devices > 1 and not link:
        raise ValueError("the hardware states no link: several devices need [link] gb_per_s in its file")
    bits = float(method.setup.container_bits)
    inside = max(_sent_inside(stage, shard, bits) for stage in stages)
    data_parallel = max(communication_bytes(stage, method, micro) for stage in stages)
    sent = micro * inside + data_parallel
    waiting = shard.pipeline - 1  # 1F1B: so many micro-batches' time stands idle (Narayanan et al., 2021, section 2.2)
    seconds = (micro + waiting) * (alone.micro_batch + (inside / link if inside else 0.0))
    seconds += alone.update / method.shared_by(1) + (data_parallel / link if sent else 0.0)
    return Plan(parallelism, stages, seconds, sent)


@lru_cache(maxsize=64)
def _sent_inside(stage: Workload, shard: Shard, bits: float) -> float:
    """Bytes that a device sends for a micro-batch: sums of activations, 2 (t-1)/t of each in the forward and again in
    the backward (sequence parallelism scatters and gathers as much), and what passes between stages, both ways."""
    rows = [op for op in stage.gemms if in_layer(op) and op.name.endswith(_ROW_PARALLEL)]
    summed = sum(op.M * op.N for op in rows) * bits / 8
    between = min((op.M * op.N for op in rows), default=0) * bits / 8  # experts have a row for each that was chosen
    part = (shard.tensor - 1) / shard.tensor
    return 2 * 2 * part * summed + (2 * between / shard.tensor if shard.pipeline > 1 else 0.0)
