"""What a step sends and packs, and the time that it takes."""

from dataclasses import replace

import pytest

from costmodel.hardware.hardware import Pass, load_hardware
from costmodel.model.entries import POLICIES
from costmodel.model.memory import Method
from costmodel.model.operations import Gemm, Pointwise, Workload
from costmodel.model.quantisation import AUTOCAST, BF16, FP32
from costmodel.planning.step import communication_bytes, packing_seconds, step_time
from costmodel.workloads.named import load_workload


def test_communication_and_step():
    workload, h100 = load_workload("roberta_base_mnli"), load_hardware("h100")
    alone, eight = Method("bf16", BF16), Method("bf16", BF16, devices=8)
    assert communication_bytes(workload, alone) == 0
    assert communication_bytes(workload, eight) == pytest.approx(2 * 7 / 8 * 4 * workload.parameters)
    assert step_time(workload, eight, h100).seconds > step_time(workload, alone, h100).seconds
    with pytest.raises(ValueError, match="states no link"):
        step_time(workload, eight, load_hardware("laptop-cpu"))


@pytest.mark.parametrize(("setup", "word"), [(FP32, 4), (BF16, 2), (AUTOCAST, 4)])
def test_weights_are_gathered_as_wide_as_they_are_kept_and_frozen_ones_where_they_are_shared_out(setup, word):
    workload = load_workload("roberta_base_mnli").freezing("fc")
    assert 0 < workload.trained < workload.parameters
    for zero in (1, 2, 3):
        sent = communication_bytes(workload, Method("", setup, devices=8, zero=zero))
        weights = 2 * workload.parameters if zero == 3 else workload.trained
        assert sent == pytest.approx(7 / 8 * (4 * workload.trained + word * weights))


def test_zero_shares_out_the_update():
    workload, h100 = load_workload("roberta_base_mnli"), load_hardware("h100")
    whole, shared = (step_time(workload, Method("", BF16, devices=8, zero=zero), h100) for zero in (0, 1))
    alone = step_time(workload, Method("", BF16), h100)
    assert alone.update == pytest.approx(30 * workload.trained / h100.bandwidth)  # bytes a parameter, read and written
    assert (whole.update, shared.update) == (alone.update, pytest.approx(alone.update / 8))
    assert whole.compute == shared.compute == alone.compute


def test_packing_takes_what_was_measured():
    """Of the three kept tensors (x, the activation's x, its y): values times ns, and a call, packed and unpacked."""
    size = 4096, 8, 8
    layers = (Gemm("a", *size, input="x"), Pointwise("g", "activation", 4096, 8), Gemm("b", *size, input="g"))
    workload = Workload("two", layers, tokens=4096)
    passes = {("pack", 4, phase): Pass(1e-9, 1e-6) for phase in ("forward", "backward")}
    method = Method("", FP32, stash=POLICIES["bfp 4"])
    assert packing_seconds(workload, method, load_hardware("h100")) is None
    assert packing_seconds(workload, Method("", FP32), load_hardware("h100")) == 0
    timed = replace(load_hardware("h100"), passes=passes)
    assert packing_seconds(workload, method, timed) == pytest.approx(2 * 3 * (4096 * 8 * 1e-9 + 1e-6))
    assert step_time(workload, method, timed).packing == packing_seconds(workload, method, timed)
