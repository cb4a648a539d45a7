"""Sweeps, Pareto fronts and a run's history."""

import json

import numpy as np
import pytest

import dsq
from costmodel.estimate import REFERENCE, evaluate
from costmodel.formats import Format, Precision
from costmodel.hardware import load_hardware
from costmodel.history import load_history
from costmodel.sweep import grid, noise_decibels, pareto, parse_range, sweep
from costmodel.workloads import load_workload

A100 = load_hardware("a100-80gb")


def test_ranges():
    assert parse_range("4") == [4]
    assert parse_range("2:5,16, 32") == [2, 3, 4, 5, 16, 32]
    for text in ("", "1:4", "4:2", "2:33", "a", "2:4:8"):
        with pytest.raises(ValueError, match="range"):
            parse_range(text)


def test_grid_is_every_combination_once():
    found = grid([[2, 4], [3], [5, 6, 7], [16]])
    rows = set(zip(*(width.tolist() for width in found.widths), strict=True))
    assert rows == {(a, 3, b, 16) for a in (2, 4) for b in (5, 6, 7)}
    assert len(found.q0) == len(rows)


@pytest.mark.parametrize("fmt", [Format("bfp"), Format("fixed")], ids=str)
def test_a_sweep_gives_what_single_estimates_give(fmt):
    workload = load_workload("roberta_base_mnli")
    found = sweep(workload, grid([[2, 16, 32], [4], [2, 9], [16, 32]]), fmt, A100)
    reference = evaluate(workload, *REFERENCE, A100)
    for row in range(len(found)):
        one = evaluate(workload, Precision(*(int(w[row]) for w in found.precision.widths)), fmt, A100)
        assert found.columns["dram"][row] == one.dram_bytes / reference.dram_bytes
        assert found.columns["arithmetic"][row] == pytest.approx(one.arithmetic / reference.arithmetic)
        assert found.columns["stash"][row] == one.stash_bytes
        assert found.columns["time"][row] == pytest.approx(one.total.seconds)


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


def write(tmp_path, data):
    path = tmp_path / "history.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_history_of_a_real_scheduler(tmp_path):
    scheduler = dsq.PrecisionScheduler(["[2,2,2,16]", "[16,4,4,16]"], patience=1)
    scheduler.record(updates=30, tokens=3000)
    scheduler.step(1.0)
    assert scheduler.step(1.0)
    scheduler.record(updates=10, tokens=1000)
    history = load_history(write(tmp_path, scheduler.history()), Format("bfp"))
    assert [level.precision for level in history.levels] == [Precision(2, 2, 2, 16), Precision(16, 4, 4, 16)]
    assert history.shares == [0.75, 0.25]
    assert (history.unit, history.format) == ("tokens", Format("bfp"))


def test_history_without_tokens_weighs_updates_and_may_name_its_format(tmp_path):
    levels = [{"precision": [2, 2, 2, 16], "updates": 1}, {"precision": [16, 4, 4, 16], "updates": 4}]
    run = {"format": "fixed", "box": 32, "box_axis": "last", "levels": levels}
    history = load_history(write(tmp_path, run), Format("bfp"))
    assert history.shares == [0.2, 0.8]
    assert (history.unit, history.format) == ("updates", Format("fixed", box=32, box_axis="last"))


def test_history_with_tokens_at_some_levels_weighs_updates_and_says_so(tmp_path):
    levels = [
        {"precision": [2, 2, 2, 16], "updates": 10, "tokens": 0},
        {"precision": [16, 4, 4, 16], "updates": 30, "tokens": 500},
        {"precision": [16, 16, 16, 16]},
    ]
    history = load_history(write(tmp_path, {"levels": levels}), Format("bfp"))
    assert history.shares == [0.25, 0.75, 0]
    assert history.weighing == "updates, as not every level counted its tokens"
    history = load_history(write(tmp_path, {"levels": levels[1:]}), Format("bfp"))  # no work at the last: no matter
    assert (history.shares, history.weighing) == ([1, 0], "tokens")


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "field levels must be a list"),
        ({"levels": []}, "field levels must be a list"),
        ({"levels": [{"precision": "[2,2,2,16]"}]}, r"levels\[0\].precision must be a list"),
        ({"levels": [{"precision": [2, 2, 2]}]}, r"levels\[0\].precision"),
        ({"levels": [{"precision": [2, 2, 2, 16], "updates": -1}]}, r"levels\[0\].updates must be a whole number"),
        ({"levels": [{"precision": [2, 2, 2, 16], "tokens": 1.5}]}, r"levels\[0\].tokens must be a whole number"),
        ({"levels": [{"precision": [2, 2, 2, 16], "updates": 0}]}, "no level records any work"),
        ({"exclude": 1, "levels": [{"precision": [2, 2, 2, 16], "updates": 1}]}, "field exclude must be a regular"),
        ({"format": "int", "levels": [{"precision": [2, 2, 2, 16], "updates": 1}]}, "format must be one of"),
    ],
)
def test_bad_history_names_the_field(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_history(write(tmp_path, data), Format("bfp"))
