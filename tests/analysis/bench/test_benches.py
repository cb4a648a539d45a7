"""The benches on few values: the process's memory on a tiny GPT, its search on known figures, races of kernels."""

import pandas as pd
import pytest

from analysis.bench import comparisons, process
from analysis.bench.__main__ import main
from analysis.bench.process import ProcessCase, largest

TINY = ["process", "--size", "1", "64", "32", "100", "--batches", "2", "--steps", "1"]


def test_rows_a_picture_and_rows_that_are_kept(tmp_path, monkeypatch):
    assert main([*TINY, "--only", "^all . packed checkpoints, in chunks, first", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(process, "measured", lambda case: {"above MiB": 1.0, "process MiB": 2.0, "seconds": 3.0})
    assert main([*TINY, "--only", "^fp32, usual, none", "--out", str(tmp_path)]) == 0
    rows = pd.read_csv(tmp_path / "process.csv")
    assert list(rows["setup"]) == ["all + packed checkpoints", "fp32"]
    assert (rows[["above MiB", "process MiB", "seconds"]] > 0).all(axis=None)
    assert (rows["above MiB"] < rows["process MiB"]).all()
    assert (tmp_path / "front.png").stat().st_size > 1000


@pytest.mark.parametrize(("limit", "expected"), [(1000, 70), (305, 0), (1010, 71)])
def test_the_largest_batch_is_found_by_what_the_process_takes(limit, expected, monkeypatch):
    asked = []

    def of_a_known_size(case):
        asked.append(case.batch)
        return {"above MiB": 10.0 * case.batch + 0.01, "process MiB": 300 + 10.0 * case.batch}

    monkeypatch.setattr(process, "measured", of_a_known_size)
    results = largest(ProcessCase("fp32", "usual", "none", 16), limit)
    assert expected * (1 - process.NEAR) - 1 <= results <= expected
    assert len(asked) < 8


def test_the_kernels_race_against_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(comparisons, "SIZES", (2 * comparisons.COLUMNS,))
    assert main(["kernels", "--rounds", "2", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "kernels.csv").read_text()
    assert all(name in text for name in ("pack stochastic", "quantize, rows", "unpack, columns", "snvint", "fixed"))
