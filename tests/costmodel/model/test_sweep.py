"""Sweeps and Pareto fronts."""

import numpy as np
import pytest

from costmodel.hardware.hardware import load_hardware
from costmodel.model.estimate import REFERENCE, evaluate
from costmodel.model.quantisation import Setup
from costmodel.model.sweep import grid, noise_decibels, pareto, parse_range, sweep
from costmodel.workloads.named import load_workload
from dsq.formats import BFP, FixedPoint
from dsq.precision import Precision

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


@pytest.mark.parametrize("dimensions", [2, 3])
def test_front_equals_brute_force(dimensions):
    points = np.random.default_rng(0).integers(0, 12, (300, dimensions)).astype(float)
    beaten = [any((q <= p).all() and (q < p).any() for q in points) for p in points]
    front = pareto(list(points.T))
    assert not any(beaten[i] for i in np.flatnonzero(front))
    assert {tuple(p) for p in points[front]} == {tuple(p) for p, b in zip(points, beaten, strict=True) if not b}
    assert len({tuple(p) for p in points[front]}) == front.sum()  # of equal points one stays


def test_noise_falls_six_decibels_a_bit():
    levels = [noise_decibels(Precision(m, m, m, m)) for m in (4, 5, 6)]
    assert np.diff(levels) == pytest.approx([-6.02, -6.02], abs=0.01)
    assert noise_decibels(Precision(16, 4, 4, 16)) > noise_decibels(Precision(16, 4, 8, 16))
