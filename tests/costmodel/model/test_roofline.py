"""Floors of operations small enough to count by hand."""

from dataclasses import replace

import pytest

from dsq.costmodel.hardware.hardware import (
    MEASURED,
    Efficiency,
    Energy,
    FusedUnit,
    Hardware,
    Pass,
    Peak,
    load_hardware,
)
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.operations import Gemm, Pointwise, Workload
from dsq.costmodel.model.roofline import ZERO, Floor, evaluate, floors, rates, traffic_of
from dsq.costmodel.model.tiles import TiledProduct, bytes_again
from dsq.costmodel.model.traffic import matmuls
from dsq.formats import BFP, Identity
from dsq.precision import Precision


@pytest.fixture
def mine():
    peaks = (
        Peak("wide", 1e12, {"bfp": (32, 32), "float": (32, 32)}, "", datasheet_flops=1e12),
        Peak("narrow", 4e12, {"bfp": (8, 8)}, "", datasheet_flops=4e12),
    )
    return Hardware("mine", 100e9, 0.1e12, peaks, {}, efficiency=MEASURED)


def test_a_step_waits_for_what_most_of_its_time_waits_for():
    """Though the products of one kernel alone would take longer than all bytes."""
    kernels = (Floor(1e12, 1e9, 26, 1, 26, 0), Floor(1e10, 1e9, 5, 6, 59, 59), Floor(1e9, 1e9, 1, 2, 15, 15))
    total = sum(kernels, start=ZERO)
    assert total.compute_seconds > total.memory_seconds
    assert [floor.memory_bound for floor in (*kernels, total)] == [False, True, True, True]


def roofs(workload, precision, mine, fmt=None, container=0):
    setup = Setup(fmt or BFP(32), precision, container=container)
    return floors(traffic_of(workload, setup, mine), matmuls(workload, setup), mine, setup.container_bits)


def test_floor_by_hand(mine):
    """A layer of 160^3, narrow forward and dx, dw in three narrow passes: a kernel takes the longer of two times."""
    n, stash = 160, 160 * 160 + 160 * 10
    workload = Workload("one", (Gemm("l", n, n, n),), tokens=n)
    floor = roofs(workload, Precision(8, 8, 8, 16), mine)["fc"]
    forward_bytes, backward_bytes = 3 * 2 * n * n + stash, 4 * 2 * n * n + stash + 4 * n * n
    forward = max(2 * n**3 / 4e12, forward_bytes / 100e9)
    backward = max(2 * n**3 / 4e12 + 2 * n**3 / (4e12 / 3), backward_bytes / 100e9)
    assert floor.bytes == forward_bytes + backward_bytes
    assert floor.flops == 6 * n**3
    assert floor.seconds == pytest.approx(forward + backward)
    assert floor.intensity == pytest.approx(6 * n**3 / (forward_bytes + backward_bytes))
    assert floor.memory_bound == (floor.intensity < floor.ridge)


def test_joules_by_hand(mine):
    """Forward and dx in a narrow pass each, dw in three; each byte of DRAM passes the buffer twice."""
    workload, setup = Workload("one", (Gemm("l", 160, 160, 160),), tokens=160), Setup(BFP(32), Precision(8, 8, 8, 16))
    stated = replace(mine, energy=Energy(dram=3.0, sram=0.5, macs={"narrow": 2.0}))
    cost = evaluate(workload, setup, stated)
    assert cost.joules == pytest.approx((1 + 1 + 3) * 160**3 * 2.0 + cost.dram_bytes * 4.0)
    assert evaluate(workload, setup, mine).joules is None
    assert evaluate(workload, Setup(BFP(32), Precision(16, 16, 16, 16)), stated).joules is None  # "wide" states none


def test_a_real_kernel_reaches_a_share_of_the_bandwidth_and_computes_or_moves(mine):
    """A forward of 160^3 in 16 bits takes both of its times; no kernel is shorter than a launch."""
    n = 160
    workload = Workload("one", (Gemm("l", n, n, n, x_grad=False, w_grad=False),), tokens=n)
    real = replace(mine, efficiency=Efficiency(memory=0.5, launch=0))
    compute, memory = 2 * n**3 / 1e12, 3 * 2 * n * n / 50e9
    assert roofs(workload, Precision(16, 16, 16, 16), real, Identity(32))["fc"].seconds == pytest.approx(
        compute + memory
    )
    slow = replace(real, efficiency=replace(real.efficiency, launch=1.0))
    assert roofs(workload, Precision(16, 16, 16, 16), slow, Identity(32))["fc"].seconds == 1


def test_fused_attention_reaches_a_share_of_its_own(mine):
    scores = Gemm("scores", 256, 64, 256, batch=64, cls="attention", weight=False, quantized=False, on_chip="y")
    whole, half = (
        roofs(Workload("one", (scores,), tokens=256), Precision(32, 32, 32, 32), replace(mine, attention=share))
        for share in (1, 0.5)
    )
    assert half["attention"].compute_seconds == pytest.approx(2 * whole["attention"].compute_seconds)
    logits = Workload("one", (Gemm("output_projection", 256, 64, 256, quantized=False, on_chip="y"),), tokens=256)
    whole, half = (roofs(logits, Precision(32, 32, 32, 32), replace(mine, attention=share))["fc"] for share in (1, 0.5))
    assert half == whole  # a loss in chunks is no attention


def test_fused_attention_takes_what_was_measured(mine):
    """A product of 256 queries, 256 keys and heads of 64: q and k are values, the scores stay on the chip; a causal
    mask leaves half of the pairs, the kernel three quarters of its time."""
    unit = FusedUnit(1e12, Pass(1e-9, 1e-6), causal=0.75)
    measured = replace(mine, measured="today", peaks=(replace(mine.peaks[0], attention=unit),))
    scores = Gemm("scores", 256, 64, 256, cls="attention", weight=False, quantized=False, on_chip="y")
    whole, causal = (
        roofs(Workload("one", (op,), tokens=256), Precision(32, 32, 32, 32), measured)["attention"].seconds / 3
        for op in (scores, replace(scores, pairs=256 * 257 // 2))
    )
    beside = 2 * 256 * 64 * 1e-9 + 1e-6
    assert whole == pytest.approx(2 * 256 * 64 * 256 / 1e12 + beside)
    assert causal == pytest.approx(0.75 * 2 * 256 * 64 * 256 / 1e12 + beside)


def test_classes_and_datatypes(mine):
    scores = Gemm("s", 4, 4, 4, cls="attention", weight=False, quantized=False)
    workload = Workload("two", (Gemm("l", 4, 4, 4), scores, Pointwise("n", "norm", 4, 4)), tokens=4)
    assert list(roofs(workload, Precision(8, 8, 8, 16), mine)) == ["attention", "fc", "other"]
    products = matmuls(workload, Setup(BFP(32), Precision(8, 8, 8, 16)))
    assert set(rates(products, "fc", mine)) == {"3 x narrow", "narrow"}
    assert set(rates(products, "attention", mine)) == {"wide"}
    assert not rates(products, "other", mine)


def test_measured_hardware_takes_what_was_measured(mine):
    """A product: operations, values and call, of experts the values of all; a pass: values and call. Neither waits for
    DRAM again."""
    peak = Peak("kernel", 1e12, {"float": (32, 32)}, "", around=Pass(1e-9, 1e-5))
    passes = {("relu", 32, phase): Pass(2e-9, 1e-6) for phase in ("forward", "backward")}
    measured = replace(mine, peaks=(peak,), measured="today", bandwidth=1.0, passes=passes)
    n = 100
    workload = Workload(
        "two", (Gemm("l", n, n, n), Gemm("m", n, n, n, weights=8), Pointwise("r", "relu", n, n)), tokens=n
    )
    costs = roofs(workload, Precision(32, 32, 32, 32), measured, Identity())
    assert costs["fc"].seconds == pytest.approx(6 * (2 * n**3 / 1e12 + 1e-5) + 3 * (3 + 10) * n * n * 1e-9)
    assert costs["other"].seconds == pytest.approx(2 * (n * n * 2e-9 + 1e-6))


def test_what_a_layer_does_beside_its_product(mine):
    """Its bias's gradient sums dy; a converted layer's transposed weight is turned over for both passes, but for codes
    of the forward, and so is its gradient."""
    peak = Peak("kernel", 1e12, {"float": (32, 32), "bfp": (32, 32)}, "")
    passes = {("column sum", 32, "forward"): Pass(1e-8, 1e-6), ("turned", 32, "forward"): Pass(2e-8, 1e-6)}
    measured = replace(mine, peaks=(peak,), measured="today", passes=passes)
    layer = Gemm("l", 10, 20, 30, bias=True)

    def seconds(layer, template, bits=32):
        workload = Workload("one", (layer,), tokens=10)
        return roofs(workload, Precision(bits, 4, 4, 16), measured, template, container=32)["fc"].seconds

    products, summed, turned = 6 * 10 * 20 * 30 / 1e12, 10 * 30 * 1e-8 + 1e-6, 20 * 30 * 2e-8 + 1e-6
    assert seconds(replace(layer, bias=False), BFP(32)) == pytest.approx(products)
    assert seconds(layer, BFP(32)) == pytest.approx(products + summed)
    assert seconds(replace(layer, transposed=True), Identity()) == pytest.approx(products + summed)
    assert seconds(replace(layer, transposed=True), BFP(32)) == pytest.approx(products + summed + 3 * turned)
    assert seconds(replace(layer, transposed=True), BFP(32), 4) == pytest.approx(products + summed + 2 * turned)


def test_each_of_several_like_operations_is_launched(mine):
    slow = replace(mine, efficiency=Efficiency(memory=0.5, launch=1.0))
    passes = tuple(Pointwise(f"layers.{layer}.n", "norm", 4, 4) for layer in range(3))
    of = lambda operations: roofs(Workload("", operations, tokens=4), Precision(8, 8, 8, 16), slow)["other"]  # noqa: E731
    assert of(passes[:1]).seconds == 2  # forward and backward
    assert of(passes).seconds == 6


def test_time_bound_and_joules_follow_the_bits_that_lie_in_dram(mine):
    """160^3: x, w and y at 8 bits, the stash at 4, w for dx at 5, dy at 6 and 16, dx at 16, each with a
    byte for 16 values; and what tiles fetch again at those bits."""
    n = 160
    layer, precision = Workload("one", (Gemm("l", n, n, n),), tokens=n), Precision(8, 4, 6, 16)
    setup, energy = Setup(BFP(32), precision), Energy(100e-12, 0, {"wide": 2e-12, "narrow": 1e-12})
    chip = replace(mine, word=1, energy=energy, bandwidth=36e9)
    cost = evaluate(layer, setup, chip)
    bits = 3 * 8.5 + 2 * 4.5 + 5.5 + 6.5 + 2 * 16.5 + 32
    assert cost.dram_bytes == cost.total.bytes == n * n * bits / 8
    assert cost.total.memory_seconds == pytest.approx(cost.dram_bytes / 36e9)
    assert cost.total.intensity == 6 * n**3 / cost.dram_bytes
    macs = n**3 * (1 + 1 + 3)  # dw in three narrow passes
    assert cost.joules == pytest.approx(macs * 1e-12 + cost.dram_bytes * 100e-12)
    containers = evaluate(layer, setup, replace(chip, word=0))
    assert (cost.total.memory_bound, containers.total.memory_bound) == (False, True)
    assert cost.total.seconds < containers.total.seconds
    tiled = evaluate(layer, setup, replace(chip, sram=8e3))
    widths = {"forward": (8.5, 8.5), "dx": (6.5, 5.5), "dw": (16.5, 4.5)}
    products = (TiledProduct(n, n, n, (a / 8, b / 8), (a / 8, b / 8, 0)) for a, b in widths.values())
    assert tiled.traffic["again"] == sum(round(bytes_again(product, 8e3)) for product in products) > 0
    assert tiled.total.bytes == cost.total.bytes + tiled.traffic["again"]


def test_a_chip_that_stores_codes_quantizes_nothing_in_dram():
    layer, setup = Workload("test", (Gemm("l", 32, 64, 48),), tokens=32), Setup(BFP(32), Precision(4, 4, 4, 4))
    assert evaluate(layer, setup, replace(load_hardware("a100-80"), word=1)).traffic["quantizing"] == 0


def test_quantizing_for_units_of_floats_is_traffic():
    """Both operands of y, dx and dw are read in 16 bits and written as bf16; a unit of bfp multiplies their codes."""
    layer, precision = Workload("test", (Gemm("l", 32, 64, 48),), tokens=32), Precision(4, 4, 4, 4)
    x, w, y = 32 * 64, 48 * 64, 32 * 48
    costs = {
        name: evaluate(layer, Setup(BFP(32), precision), load_hardware(name))
        for name in ("a100-80", "msfp-accelerator")
    }
    assert costs["a100-80"].traffic["quantizing"] == 2 * (x + w + y) * (2 + 2)
    assert costs["msfp-accelerator"].traffic["quantizing"] == 0
    difference = costs["a100-80"].total.bytes - costs["msfp-accelerator"].total.bytes
    assert difference == costs["a100-80"].traffic["quantizing"]
    expected = load_hardware("a100-80").moving(costs["a100-80"].dram_bytes)
    assert costs["a100-80"].total.memory_seconds == pytest.approx(expected)
