"""The cost model of any workload: parts add up to the whole, and fewer bits never move more."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.operations import Gemm
from dsq.costmodel.model.roofline import evaluate, traffic_of
from dsq.costmodel.model.traffic import transfers
from dsq.formats import BFP
from dsq.precision import Precision
from tests.costmodel.model.test_ledger import random_setup, random_workload

seeds = st.integers(0, 2**32).map(random.Random)
A100 = load_hardware("a100-80gb")


@given(seeds)
def test_traffic_of_operations_is_the_traffic_of_the_step(rng: random.Random) -> None:
    workload, setup = random_workload(rng), random_setup(rng)
    cost = evaluate(workload, setup, A100)
    moved = traffic_of(workload, setup, A100)
    assert float(cost.dram_bytes) == pytest.approx(sum(float(operation.bytes) for operation in moved))
    assert float(cost.total.bytes) == pytest.approx(float(cost.dram_bytes))


@given(seeds, st.lists(st.sampled_from([2, 3, 4, 8, 16, 32]), min_size=4, max_size=4), st.integers(0, 3))
def test_fewer_bits_never_cost_more(rng: random.Random, widths: list[int], point: int) -> None:
    workload = random_workload(rng)
    narrower = [max(2, width // 2) if index == point else width for index, width in enumerate(widths)]
    cost, lower_cost = (evaluate(workload, Setup(BFP(32), Precision(*bits)), A100) for bits in (widths, narrower))
    assert lower_cost.arithmetic <= cost.arithmetic
    assert lower_cost.stash_bytes <= cost.stash_bytes


@given(seeds)
def test_the_update_reads_every_gradient_as_it_was_written(rng: random.Random) -> None:
    """The gradients of weights, biases, norms and tables; those of tied weights once they are summed."""
    workload, setup = random_workload(rng), random_setup(rng)
    written = summed = read = 0.0
    for moved in transfers(workload, setup):
        op = moved.group.operation
        if isinstance(op, Gemm) and not op.weight:
            continue
        if moved.direction == "write" and moved.tensor in ("dw", "d bias", "d scale and shift", "d table"):
            written += float(moved.bytes)
        elif moved.tensor in ("dw, d table", "their sum"):
            summed += float(moved.bytes) * (1 if moved.direction == "write" else -1)
        elif moved.direction == "read" and (moved.tensor, moved.phase) == ("dw", "update"):
            read += float(moved.bytes)
    assert written + summed == read == 4 * workload.trained
