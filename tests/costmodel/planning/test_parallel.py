"""The cheapest way to use several devices, against all of them tried."""

from dataclasses import replace

import pytest

from costmodel.hardware.hardware import Pass, load_hardware
from costmodel.model.memory import Method
from costmodel.model.quantisation import BF16, FP32
from costmodel.model.stash import POLICIES
from costmodel.planning.parallel import Parallelism, StageTime, cheapest, parallelisms, plan, stage_time
from costmodel.planning.step import step_time
from costmodel.workloads.named import load_shapes
from costmodel.workloads.shapes import MixtureOfExperts
from costmodel.workloads.shard import Shard, stages

H100 = load_hardware("h100")
MODEL = replace(load_shapes("opt_1.3b"), sequences=1, target_length=256)
PACKED = Method("bf16, bfp 4", BF16, stash=POLICIES["bfp 4"])
METHODS = [Method("fp32", FP32), Method("bf16", BF16), PACKED, Method("bf16, recompute", BF16, recompute=True)]


def cut(shard):
    return stages(MODEL, shard)


def test_each_methods_cheapest_that_fits():
    every = []
    for candidate in parallelisms(METHODS, 4, 4):
        made = cut(candidate.shard)
        every.append(plan(made, candidate, H100.link, stage_time(made, candidate.method, H100)))
    peaks = sorted(made.memory.peak for made in every)
    for budget in (peaks[0] - 1, peaks[len(peaks) // 3], peaks[-1]):
        found = cheapest(cut, parallelisms(METHODS, 4, 4), H100, budget)
        for method in METHODS:
            fit = [it for it in every if it.parallelism.method.name == method.name and it.memory.peak <= budget]
            costs = [made.device_seconds for made in found if made.parallelism.method.name == method.name]
            assert costs == ([min(it.device_seconds for it in fit)] if fit else [])
        assert all(made.memory.peak <= budget for made in found)


def test_packing_counts_where_it_was_measured():
    passes = {("pack", 4, phase): Pass(1e-9, 0) for phase in ("forward", "backward")}
    for hardware, counts in ((H100, False), (replace(H100, passes=passes), True)):
        found = cheapest(cut, parallelisms(METHODS[1:3], 2, 1), hardware, 1e12)
        seconds = {made.parallelism.method.name: made.seconds for made in found}
        assert (seconds["bf16, bfp 4"] > seconds["bf16"]) == counts


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
