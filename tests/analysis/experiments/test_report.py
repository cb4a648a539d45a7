"""The ledger, and the report of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis.experiments import demo, report
from analysis.experiments.ledger import add_row, configurations, place, read_ledger


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


@pytest.mark.parametrize(("on_cpu", "gpu"), [(False, "H100"), (True, "")])
def test_a_run_that_trains_on_the_cpu_has_no_gpu(on_cpu: bool, gpu: str, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    assert place(on_cpu)["gpu"] == gpu


def test_the_report_has_mean_spread_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "ledger.csv"
    for seed, (plain, bfp, snvint) in enumerate(((80, 70, 76), (82, 73, 77)), start=1):
        add_row(path, entry(f"fp32_seed{seed}", plain, None))
        add_row(path, entry(f"bfp_4_seed{seed}", bfp, 0.3))
        add_row(path, entry(f"snvint_4_seed{seed}", snvint, 0.3))
    assert report.main([str(path), str(path), "--out", str(tmp_path / "there")]) == 0  # twice: the same runs
    lines = capsys.readouterr().out.splitlines()
    (bfp,) = (line.split() for line in lines if " bfp " in f" {line} ")
    assert bfp == ["[4,4,4,16]", "bfp", "2", "71.5", "3.0", "-9.5", "2.000", "0.0333", "0.3000", "1.0"]
    assert "| [4,4,4,16] | bfp " in (tmp_path / "there" / "report.md").read_text()


def test_of_a_run_that_two_ledgers_have_the_later_counts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, score in (("one", 70), ("other", 71)):
        add_row(tmp_path / f"{name}.csv", entry("fp32_seed1", score, None))
    assert report.main([str(tmp_path / f"{name}.csv") for name in ("one", "one", "other")]) == 0
    said = capsys.readouterr().out
    assert said.count("r fp32_seed1: 70 in one ledger, 71 in a later one, which counts") == 1
    assert "  71.0  " in said


@pytest.mark.parametrize("option", ["tied", "attention", "units", "lr_at_rise"])
def test_configurations_that_differ_in_one_option_are_told_apart(option: str) -> None:
    rows = [entry("bfp_4_seed1", 70, 0.3), entry(f"bfp_4_{option}_seed1", 71, 0.3, **{option: "other"})]
    ((_, group),) = configurations(rows).items()
    assert [one[option] for one in report.records(group)] == [None, "other"]


def test_patience_tells_apart_those_that_wait_for_a_plateau() -> None:
    two, rises = {"levels": "[4,4,4,8] [8,4,4,8]"}, {"rise_at": "0.8"}
    rows = [entry(f"bfp_{n}_seed1", 70, 0.3, patience=n, **two) for n in "25"]
    rows += [entry(f"bfp_{n}_at0.8_seed1", 70, 0.3, patience=n, **two, **rises) for n in "25"]
    ((_, group),) = configurations(rows).items()
    assert [one["patience"] for one in report.records(group)] == ["2", "5", None, None]


@pytest.mark.parametrize(
    ("column", "one", "other", "named"),
    [
        ("training", "--cpu --max-update 9 --seed 1", "--cpu --max-update 3 --seed 2", "--max-update 3 --max-update 9"),
        ("data", "vocab=9 task=", "vocab=3 task=", "vocab=3 vocab=9"),
        ("text_sha256", "a", "b", "a b"),
    ],
)
def test_seeds_that_differ_in_more_are_no_configuration(column: str, one: str, other: str, named: str) -> None:
    rows = [entry(f"bfp_4_seed{seed}", 70, 0.3, **{column: text}) for seed, text in enumerate((one, other), start=1)]
    with pytest.raises(ValueError, match=f"r: bfp_4_seed1 and bfp_4_seed2 differ in {column} by {named}: "):
        configurations(rows)


def test_seeds_of_ledgers_of_several_ages_are_one_configuration() -> None:
    later = {"data": "vocab=9 task=", "training": "--cpu --seed 2 --lr 1", "text_sha256": "a"}
    rows = [entry("bfp_4_seed1", 70, 0.3, data="vocab=9", training="--cpu --seed 1 --lr 1")]
    (group,) = configurations([*rows, entry("bfp_4_seed2", 71, 0.3, **later)]).values()
    assert len(group) == 1


def test_fp32_of_other_training_is_not_subtracted() -> None:
    rows = [entry("fp32_seed1", 60, None, training="--lr 1 --max-update 3 --seed 1")]
    rows.append(entry("bfp_4_seed1", 69, 0.3, training="--max-update 3 --lr 1 --dsq-box 8"))
    (group,) = configurations(rows).values()
    assert [one["minus fp32"] for one in report.records(group)] == [None, 9]
    rows.append(entry("bfp_8_seed1", 69, 0.3, training="--max-update 9 --lr 1 --dsq-box 8"))
    with pytest.raises(ValueError, match="r: bfp_4_seed1 and bfp_8_seed1 differ in training by --max-update 3 --max"):
        configurations(rows)


def test_the_demos_picture_is_drawn(tmp_path: Path) -> None:
    plain = {"valid_loss": [(1, 5.0), (2, 4.0)], "kept_mib": 9.0, "bleu": 28.1}
    demo.draw({"fp32": plain, "DSQ": {**plain, "kept_mib": 2.0}}, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
