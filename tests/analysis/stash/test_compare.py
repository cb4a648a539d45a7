"""The comparison on a model of a few values: the numbers against hand counts, and what the user gets."""

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from analysis.stash import compare, setups
from analysis.stash.allocator import HeldBytes
from analysis.stash.setups import CASES, SETUPS, PolicySetup, TrainingCase
from dsq import stash


def tiny():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


BATCH = 4 * 32 * 64  # bytes of one activation
TINY = {"encoder": TrainingCase(tiny, lambda: (torch.randn(32, 64), torch.randn(32, 64)), F.mse_loss)}
ROWS = tuple(PolicySetup("encoder", name) for name in ("plain", "bfp 4", "wtacrs 0.5", "[16,4,4,16]"))


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(compare, "CASES", TINY)
    monkeypatch.setattr(compare, "SETUPS", ROWS)
    monkeypatch.setattr(compare, "sizes", claimed_here)


def claimed_here(setup):
    """Stand in for compare.sizes, whose held bytes take a process of their own: test_allocator.py."""
    bench = compare.Bench(TINY[setup.case])
    model = compare.trained(setup.name, bench)
    return stash.measure(lambda: model(bench.x)).nbytes, HeldBytes(3 * BATCH, 4 * BATCH, 0)


def test_table_csv_and_picture(few, tmp_path, capsys):
    assert compare.main(["--out", str(tmp_path), "--seeds", "3"]) == 0
    rows = pd.read_csv(tmp_path / "compare_stash.csv").set_index("setup")
    plain, bfp, noisy = rows.loc["plain"], rows.loc["bfp 4"], rows.loc["wtacrs 0.5"]
    assert plain["stash, MiB"] * 2**20 == pytest.approx(BATCH)  # the batch was there before
    assert plain["held, MiB"] * 2**20 == pytest.approx(3 * BATCH)
    assert (plain["error"], plain["cosine"]) == (0, pytest.approx(1))
    packed = BATCH / 2**20 * 4.5 / 32
    assert bfp["stash, MiB"] == pytest.approx(
        packed * (1 + 6.5 / 4.5), rel=1e-4
    )  # the activation's input has two bits more
    assert 0 < bfp["error"] < 0.3
    assert plain["peak, MiB"] > plain["stash, MiB"]
    assert abs(noisy["slope"] - 1) < 1
    assert noisy["slope +-"] > 0
    assert pd.isna(bfp["slope"])
    assert (tmp_path / "compare_stash.png").stat().st_size > 1000
    assert "nan" not in capsys.readouterr().out


def test_rows_measured_before_are_kept_in_the_order_of_the_setups(few, tmp_path):
    for only in ("bfp", "plain"):
        assert compare.main(["--out", str(tmp_path), "--only", only]) == 0
    assert list(pd.read_csv(tmp_path / "compare_stash.csv")["setup"]) == ["plain", "bfp 4"]


def test_gradients_join_the_sizes_measured_before(few, tmp_path):
    for what in ("sizes", "gradients"):
        assert compare.main(["--out", str(tmp_path), "--measure", what, "--only", "bfp"]) == 0
        (row,) = pd.read_csv(tmp_path / "compare_stash.csv").to_dict("records")
        assert pd.isna(row["error"]) == (what == "sizes")
    assert row["held, MiB"] * 2**20 == pytest.approx(3 * BATCH)


def test_every_setup_is_a_row_of_its_own():
    assert setups.NAMES.keys() == CASES.keys()
    assert len({(setup.model, setup.row_name) for setup in SETUPS}) == len(SETUPS)
