"""A step sends and packs bytes, and takes its time: each beside a sum by hand."""

from dataclasses import replace

import pytest

from dsq.costmodel.hardware.hardware import Pass, load_hardware
from dsq.costmodel.model.methods import AUTOCAST, BF16, FP32, POLICIES, Method
from dsq.costmodel.model.operations import Gemm, Pointwise, Workload
from dsq.costmodel.planning.step import communication_bytes, packing_seconds, sending_seconds, step_time
from dsq.costmodel.workloads.named import load_workload


def test_sending_takes_the_slower_of_two_links_and_a_latency_for_each_hop():
    """A model of one layer under ZeRO-3: two gathers and a scatter, of the layer and of the rest."""
    layer = Gemm("decoder.layers.0.fc", 64, 512, 512)
    workload = Workload("one", (layer, Pointwise("optimiser", "adam", layer.parameters, 1)), tokens=64)
    h100 = load_hardware("h100")
    hop, between = h100.efficiency.hop, h100.efficiency.hop_between_nodes
    for devices, rate, hops in ((8, h100.link, 7 * hop), (64, h100.network, 56 * hop + 7 * between)):
        method = Method("", BF16, devices=devices, zero=3)
        expected = communication_bytes(workload, method) / rate + 6 * hops
        assert sending_seconds(workload, method, h100) == pytest.approx(expected)


def test_a_step_waits_for_a_share_of_what_it_sends_and_for_what_it_cannot_hide():
    workload, method = load_workload("roberta_base_mnli"), Method("", BF16, devices=8)
    quick, share = load_hardware("h100"), load_hardware("h100").efficiency.exposed
    hidden = step_time(workload, method, quick)
    assert hidden.communication < hidden.compute
    assert hidden.exposed == pytest.approx(share * hidden.communication)
    slow = step_time(workload, method, replace(quick, link=quick.link / 1000))
    assert slow.exposed == pytest.approx(slow.communication - (1 - share) * slow.compute)


def test_fsdp_computes_in_16_bits_what_autocast_leaves_in_32():
    workload, h100 = load_workload("opt_1.3b"), load_hardware("h100")
    autocast, bf16 = (step_time(workload, Method("", setup, devices=8, zero=3), h100) for setup in (AUTOCAST, BF16))
    assert autocast == bf16


@pytest.mark.parametrize(("setup", "word"), [(FP32, 4), (BF16, 2), (AUTOCAST, 4)])
def test_what_no_device_has_whole_is_sent_for_each_micro_batch_as_wide_as_it_is_kept(setup, word):
    """Under ZeRO-2 the gradients of each, under ZeRO-3 its weights too, for the forward and for the backward, and those
    that are frozen."""
    workload = load_workload("roberta_base_mnli").freezing("fc")
    assert 0 < workload.trained < workload.parameters
    gradients, weights = 4 * workload.trained, word * workload.trained
    gathered = 2 * (2 if setup.autocast else word) * workload.parameters
    for batches in (1, 8):
        sent = [2 * gradients, gradients + weights, batches * gradients + weights, batches * (gradients + gathered)]
        for zero, whole in enumerate(sent):
            method = Method("", setup, devices=8, zero=zero)
            assert communication_bytes(workload, method, batches) == pytest.approx(7 / 8 * whole)


def test_zero_shares_out_the_update():
    workload, h100 = load_workload("roberta_base_mnli"), load_hardware("h100")
    whole, shared = (step_time(workload, Method("", BF16, devices=8, zero=zero), h100) for zero in (0, 1))
    alone = step_time(workload, Method("", BF16), h100)
    moving = 30 * workload.trained / (h100.bandwidth * h100.efficiency.memory)  # bytes read and written
    assert alone.update == pytest.approx(moving + 8 * workload.trained / h100.vector_flops)  # values
    assert (whole.update, shared.update) == (alone.update, pytest.approx(alone.update / 8))
    assert whole.compute == shared.compute == alone.compute


def test_packing_takes_what_was_measured():
    """Values times ns, and a call: x and the activation's x are packed and unpacked, its y is made again."""
    size = 4096, 8, 8
    layers = (Gemm("a", *size, input="x"), Pointwise("g", "activation", 4096, 8), Gemm("b", *size, input="g"))
    workload = Workload("two", layers, tokens=4096)
    passes = {("pack", 4, phase): Pass(1e-9, 1e-6) for phase in ("forward", "backward")}
    method = Method("", FP32, stash=POLICIES["bfp 4"])
    assert packing_seconds(workload, Method("", FP32), load_hardware("h100")) == 0
    timed = replace(load_hardware("h100"), passes=passes)
    assert packing_seconds(workload, method, timed) == pytest.approx((2 * 2 + 1) * (4096 * 8 * 1e-9 + 1e-6))
    assert step_time(workload, method, timed).packing == packing_seconds(workload, method, timed)
    assert step_time(workload, method, timed).packing_measured


def test_packing_that_was_never_measured_moves_its_bytes_twice():
    """A kept x of 16 bits becomes codes of 4 bits and a half with their scales, and x again."""
    workload = Workload("one", (Gemm("a", 4096, 4096, 8, input="x"),), tokens=4096)
    method, h100 = Method("", BF16, stash=POLICIES["bfp 4"]), load_hardware("h100")
    expected = 2 * 4096 * 4096 * (16 + 4.5) / 8 / (h100.bandwidth * h100.efficiency.memory)
    assert packing_seconds(workload, method, h100) == pytest.approx(expected)
    assert not step_time(workload, method, h100).packing_measured
