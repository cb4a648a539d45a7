"""The ledger, and the report of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis.experiments import report
from analysis.experiments.ledger import picture
from analysis.experiments.ledger.configurations import configurations
from analysis.experiments.ledger.ledger import add_row, read_ledger


def entry(name: str, score: float, dram: float | None, **more: object) -> dict[str, object]:
    levels = "none" if dram is None else "[4,4,4,16]"
    format = "" if dram is None else name.split("_")[0]
    row = {
        "recipe": "r",
        "run": name,
        "seed": name[-1],
        "score": score,
        "measure": "BLEU",
        "levels": levels,
        "format": format,
    }
    return {**row, "arithmetic": dram and dram / 9, "dram": dram, "seconds": 60, "best_valid_loss": 2.0, **more}


def test_a_ledger_has_one_row_a_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    for name, score in (("a", 1.5), ("b", 2.5), ("a", 3.5)):
        add_row(path, entry(name, score, 0.3))
    add_row(path, entry("c", 4.5, 0.3, label="later, a column"))
    rows = read_ledger(path)
    assert [(row["run"], row["score"], row["label"]) for row in rows] == [
        ("a", "3.5", ""),
        ("b", "2.5", ""),
        ("c", "4.5", "later, a column"),
    ]
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: is no ledger"):
        read_ledger(tmp_path / "other.csv")


def test_processes_that_enter_rows_at_once_lose_none(tmp_path: Path) -> None:
    """Threads here, whose locks differ as processes' do."""
    ledger, names = tmp_path / "ledger.csv", [f"run{i}" for i in range(30)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: add_row(ledger, entry(name, 1.0, 0.3)), names))
    assert sorted(row["run"] for row in read_ledger(ledger)) == sorted(names)


def test_the_report_has_mean_spread_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "ledger.csv"
    for seed, (plain, bfp, snvint) in enumerate(((80, 70, 76), (82, 73, 77)), start=1):
        add_row(path, entry(f"fp32_seed{seed}", plain, None))
        add_row(path, entry(f"bfp_4_seed{seed}", bfp, 0.3, paper_score=71))
        add_row(path, entry(f"snvint_4_seed{seed}", snvint, 0.3))
    assert report.main([str(path), str(path), "--out", str(tmp_path / "there")]) == 0  # twice: the same runs
    lines = capsys.readouterr().out.splitlines()
    (bfp,) = (line.split() for line in lines if " bfp " in f" {line} ")
    assert bfp == ["[4,4,4,16]", "bfp", "2", "71.5", "3.0", "-9.5", "71.00", "2.000", "0.0333", "0.3000", "1.0"]
    assert (tmp_path / "there" / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "![cost against BLEU](r.png)" in (tmp_path / "there" / "report.md").read_text()


def test_the_front_is_what_nothing_beats() -> None:
    points = [(0.3, 70.0), (0.3, 75.0), (0.4, 74.0), (0.5, 80.0), (0.2, 60.0)]
    assert picture.front(points) == [(0.2, 60.0), (0.3, 75.0), (0.5, 80.0)]


@pytest.mark.parametrize("option", ["tied", "attention", "fraction_bits", "lr_at_rise"])
def test_configurations_that_differ_in_one_option_are_told_apart(option: str) -> None:
    rows = [entry("bfp_4_seed1", 70, 0.3), entry(f"bfp_4_{option}_seed1", 71, 0.3, **{option: "other"})]
    ((_, group),) = configurations(rows).items()
    assert [one[option] for one in report.records(group)] == [None, "other"]
