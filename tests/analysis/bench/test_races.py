"""Every race of the bench of kernels starts, on few values."""

from analysis.bench import races
from analysis.bench.__main__ import main


def test_the_kernels_race_against_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(races, "LARGE", 2 * races.COLUMNS)
    monkeypatch.setattr(races, "SIZES", (1 << 12,))
    assert main(["kernels", "--rounds", "2", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "kernels.csv").read_text()
    assert all(name in text for name in ("pack stochastic", "quantise, rows", "unpack, columns", "sbfp", "snvint"))
