"""A step over several devices: what it sends, and how long it takes."""

from dataclasses import replace

import pytest

from costmodel.hardware.hardware import load_hardware
from costmodel.model.memory import Method
from costmodel.model.quantisation import BF16
from costmodel.planning.parallel import Parallelism, StageTime, plan, stage_time
from costmodel.planning.step import step_time
from costmodel.workloads.named import load_shapes
from costmodel.workloads.shapes import MixtureOfExperts
from costmodel.workloads.shard import Shard, stages

H100 = load_hardware("h100")
MODEL = replace(load_shapes("opt_1.3b"), sequences=1, target_length=256)


def cut(shard):
    return stages(MODEL, shard)


def test_stages_pass_on_a_row_a_token_whatever_the_experts():
    """2 bytes a value, to the next stage and back."""
    experts = MixtureOfExperts(8, 4, 256)
    for model in (MODEL, replace(MODEL, decoder=replace(MODEL.decoder, experts=experts))):
        made = stages(model, Shard(pipeline=2))
        bf16 = Parallelism(Method("bf16", BF16), Shard(pipeline=2), micro_batches=1)
        assert plan(made, bf16, H100.link, StageTime(1.0, 0.0)).sent == 2 * 256 * model.decoder.d * 2


def test_the_optimiser_runs_once_a_step_and_each_device_its_share():
    """Four micro-batches: four forwards and backwards, one update, of which ZeRO leaves a device its share."""
    for zero, devices in ((0, 1), (0, 2), (1, 2), (3, 2)):
        method = Method("bf16", BF16, zero=zero, devices=devices)
        made = cut(Shard())
        times = [
            plan(made, Parallelism(method, Shard(), micro), 1e30, stage_time(made, method, H100)) for micro in (1, 4)
        ]
        alone = step_time(made[0], replace(method, zero=0, devices=1), H100)
        assert alone.update > 0.1 * alone.compute
        for micro, planned in zip((1, 4), times, strict=True):
            share = devices if zero else 1
            assert planned.seconds == pytest.approx(micro * alone.compute + alone.update / share)


def test_what_no_device_has_whole_is_sent_for_each_micro_batch():
    """Under ZeRO-2 the gradients, under ZeRO-3 the weights too, gathered for the forward and for the backward."""
    made = cut(Shard())
    gradients, weights = 4 * made[0].trained, 2 * made[0].parameters  # bytes; everything trains
    sent = {0: 2 * gradients, 1: gradients + weights, 2: 8 * gradients + weights, 3: 8 * (gradients + 2 * weights)}
    for zero, whole in sent.items():
        eight = Parallelism(Method("bf16", BF16, zero=zero, devices=4), Shard(), micro_batches=8)
        assert plan(made, eight, H100.link, StageTime(1.0, 0.0)).sent == pytest.approx(3 / 4 * whole)
