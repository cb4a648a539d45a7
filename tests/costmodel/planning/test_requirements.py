"""What hardware a precision needs: each answer put back into the hardware it was asked of."""

from dataclasses import replace

import pytest

from costmodel.hardware.hardware import load_hardware
from costmodel.model.arithmetic import matmuls
from costmodel.model.energy import energy
from costmodel.model.operations import Gemm, Workload
from costmodel.model.quantisation import Setup
from costmodel.model.traffic import transfers
from costmodel.planning.requirements import Contest, energy_properties, solve, time_properties
from costmodel.workloads.named import load_workload
from dsq.formats import BFP, Identity
from dsq.precision import Precision

BF16 = Setup(Identity(), Precision(16, 16, 16, 16))
LEVEL = Setup(BFP(32), Precision(16, 4, 4, 16))
H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def contest():
    return Contest(load_workload("opt_1.3b"), LEVEL, BF16)


def test_coded_products_of_a_setup(contest):
    assert contest.products() == [(BFP(16), BFP(16)), (BFP(16), BFP(4)), (BFP(4), BFP(4))]
    assert Contest(contest.workload, BF16, BF16).products() == []


@pytest.mark.parametrize("goal", [1.0, 1.1])
def test_what_is_needed_just_reaches_the_goal(contest, goal):
    for gain, properties in (
        (contest.speed, time_properties(contest, H100)),
        (contest.saving, energy_properties(contest, H100)),
    ):
        for required in solve(gain, goal, properties):
            change = required.property.change
            assert gain(change(1.0)) < goal
            if required.factor is None:
                assert required.limit < goal
                continue
            nearer = required.factor**0.98
            assert gain(change(required.factor)) >= goal > gain(change(nearer))


def test_a_faster_unit_by_hand():
    """A layer bound by its products: 16 x 16 in four bf16 passes breaks even at four times the rate."""
    n = 4096
    workload = Workload("one", (Gemm("l", n, n, n, bias=False),), tokens=n)
    contest = Contest(workload, Setup(BFP(32), Precision(16, 16, 16, 16)), BF16)
    fast = replace(H100, bandwidth=1e18)
    (rate, *_) = solve(contest.speed, 1.0, time_properties(contest, fast))
    assert rate.property.name == "rate of 16 x 16 bits"
    assert rate.factor == pytest.approx(4, rel=1e-3)
    assert rate.doubled == pytest.approx(0.5)


def test_what_the_setup_already_does_needs_nothing():
    msfp = load_hardware("msfp-accelerator")
    contest = Contest(load_workload("transformer_iwslt_de_en"), Setup(BFP(32), Precision(4, 4, 4, 16)), BF16)
    assert contest.speed(msfp) > 1
    assert {required.factor for required in solve(contest.speed, 1.0, time_properties(contest, msfp))} == {1.0}


def test_energy_by_hand():
    """Bytes times their energy; a 16 x 4 product is two bf16 passes, a 4 x 4 one, a 16 x 16 four."""
    n = 64
    workload = Workload("one", (Gemm("l", n, n, n, bias=False),), tokens=n)
    moved, listed = transfers(workload, LEVEL, H100.on_chip_bytes), matmuls(workload, LEVEL)
    found = energy(moved, listed, H100)
    assert found.products == pytest.approx((4 + 1 + 2) * n**3 * 0.59e-12)
    assert found.dram == pytest.approx(sum(transfer.total for transfer in moved) * 44e-12)
    assert energy(moved, listed, load_hardware("laptop-cpu")) is None
