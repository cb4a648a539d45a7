"""Sweeps, and where no bit is free."""

import numpy as np
import pytest

from costmodel.hardware.hardware import load_hardware
from costmodel.model.estimate import REFERENCE, evaluate
from costmodel.model.quantisation import Setup
from costmodel.model.sweep import front, grid, parse_range, sweep
from costmodel.workloads.named import load_workload
from dsq.formats import BFP, FixedPoint

A100 = load_hardware("a100-80gb")


def test_ranges():
    assert parse_range("4") == [4]
    assert parse_range("2:5,16, 32") == [2, 3, 4, 5, 16, 32]
    for text in ("", "1:4", "4:2", "2:33", "a", "2:4:8"):
        with pytest.raises(ValueError, match="range"):
            parse_range(text)


def test_grid_is_every_combination_once():
    found = grid([[2, 4], [3], [5, 6, 7], [16]])
    rows = set(zip(*(width.tolist() for width in found), strict=True))
    assert rows == {(a, 3, b, 16) for a in (2, 4) for b in (5, 6, 7)}
    assert len(found.q0) == len(rows)


@pytest.mark.parametrize("template", [BFP(32), FixedPoint(32)], ids=str)
def test_a_sweep_gives_what_single_estimates_give(template):
    workload, precisions = load_workload("roberta_base_mnli"), grid([[2, 16, 32], [4], [2, 9], [16, 32]])
    columns = sweep(workload, Setup(template, precisions), A100)
    reference = evaluate(workload, REFERENCE, A100)
    for row in range(len(precisions)):
        one = evaluate(workload, Setup(template, precisions[row]), A100)
        assert columns["dram"][row] == one.dram_bytes / reference.dram_bytes
        assert columns["arithmetic"][row] == pytest.approx(one.arithmetic / reference.arithmetic)
        assert columns["stash"][row] == one.stash_bytes
        assert columns["time"][row] == pytest.approx(one.total.seconds)


def test_front_is_where_any_wider_neighbour_costs_more():
    """By hand: the time steps up behind 4 and 8 bits of the wider of q0 and q2, the stash grows with q1, q3 is free."""
    precision = grid([[2, 4, 8, 16], [2, 3], [4, 8, 16], [8, 16]])
    time = np.searchsorted([4, 8], np.maximum(precision.q0, precision.q2)).astype(float)
    kept = front(precision, [time, precision.q1.astype(float)])
    found = {tuple(precision[row]) for row in np.flatnonzero(kept)}
    assert found == {(bits, q1, bits, 16) for bits in (4, 8, 16) for q1 in (2, 3)}


def test_where_no_bit_is_free_on_an_a100():
    """DRAM traffic knows q1 alone, as long as all fit in 16 bits."""
    precision = grid([range(2, 17)] * 4)
    columns = sweep(load_workload("roberta_base_mnli"), Setup(BFP(32), precision), A100)
    kept = front(precision, [columns["dram"]])
    assert [tuple(precision[row]) for row in np.flatnonzero(kept)] == [(16, q1, 16, 16) for q1 in range(2, 17)]
