"""A call of the command runs, skips and enters trainings; here something else stands for their processes."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from analysis.evidence import __main__ as command
from analysis.evidence import problems, steps
from analysis.evidence.ledger import Session, enter, read_rows
from analysis.evidence.loop import Problem
from analysis.evidence.suite import FP32, Run, load_suite
from dsq.command import as_csv

SETTINGS = ("fp32", "[8,4,8,8]")


class Trainings:
    """Stands for the processes: each run's loss is its seed, and 1 more where it is not fp32."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: list[tuple[str, str, int]] = []
        self.failing: set[str] = set()
        monkeypatch.setattr(Session, "_train", lambda _, run, result: self.train(run, result))

    def train(self, run: Run, result: Path):
        self.run.append(run.key)
        status = 1 if run.setting.name in self.failing else 0
        if not status:
            loss = run.seed + (run.setting.name != "fp32")
            result.write_text(json.dumps({"loss": loss, "score": 50.0, "saved_mib": None}))
        return status, resource.getrusage(resource.RUSAGE_SELF)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    return Trainings(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "graph").mkdir(parents=True)
    (tmp_path / "data" / "graph" / "ind.cora.graph").touch()
    return tmp_path / "data"


def call(data: Path, *arguments: str) -> int:
    folder = data.parent
    flags = ["--data", str(data), "--work", str(folder / "work"), "--ledger", str(folder / "ledger.csv")]
    return command.main(["run", *flags, "--tasks", "gcn-cora", "--tier", "3", *arguments])


def test_a_suite_goes_on_where_it_stopped(trainings: Trainings, data: Path, capsys) -> None:
    assert call(data, "--settings", *SETTINGS, "--seeds", "1") == 0
    first = trainings.run.copy()
    assert first == [("gcn-cora", name, 1) for name in SETTINGS]
    assert call(data, "--settings", *SETTINGS, "--seeds", "1", "2") == 0
    assert trainings.run == first + [("gcn-cora", name, 2) for name in SETTINGS]
    assert "2 of 4 runs are in the ledger" in capsys.readouterr().out
    rows = read_rows(data.parent / "ledger.csv", load_suite())
    assert [float(rows["gcn-cora", "[8,4,8,8]", seed]["loss"]) for seed in (1, 2)] == [2, 3]
    assert all(row["seconds"] and row["peak_mib"] and row["cpu"] and row["torch"] for row in rows.values())


def test_a_row_of_another_definition_does_not_count_and_is_replaced(trainings: Trainings, data: Path) -> None:
    ledger = data.parent / "ledger.csv"
    enter(ledger, {"task": "gcn-cora", "setting": "fp32", "seed": 1, "loss": 9, "score": 1, "definition": "old"})
    assert read_rows(ledger, load_suite()) == {}
    assert call(data, "--settings", "fp32", "--seeds", "1") == 0
    assert [float(row["loss"]) for row in read_rows(ledger).values()] == [1]


def test_again_runs_what_is_done_and_replaces_its_rows(trainings: Trainings, data: Path) -> None:
    for arguments in ([], [], ["--again"]):
        assert call(data, "--settings", "fp32", "--seeds", "1", *arguments) == 0
    assert len(trainings.run) == 2
    assert len(read_rows(data.parent / "ledger.csv")) == 1


def test_the_highest_tier_repeats_only_what_lies_within_the_noise(trainings: Trainings, data: Path) -> None:
    assert call(data, "--settings", "fp32", "mesa") == 0
    assert [seed for _, name, seed in trainings.run if name == "mesa"] == [1]  # twice fp32's loss
    assert [seed for _, name, seed in trainings.run if name == "fp32"] == [1, 2, 3]


def test_absent_data_are_skipped_with_a_line(trainings: Trainings, data: Path, capsys) -> None:
    shutil.rmtree(data / "graph")
    assert call(data, "--settings", "fp32") == 0
    assert trainings.run == []
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert line.startswith("skipped gcn-cora: graph/ind.cora.graph is not under")
    assert line.endswith("Get Planetoid's files of Cora, github.com/kimiyoung/planetoid")


def test_a_failed_run_is_named_and_the_others_are_done(trainings: Trainings, data: Path, capsys) -> None:
    trainings.failing.add("fp32")
    assert call(data, "--settings", *SETTINGS, "--seeds", "1") == 2
    assert "1 of 2 runs failed, first gcn-cora, fp32, seed 1" in capsys.readouterr().err
    assert list(read_rows(data.parent / "ledger.csv")) == [("gcn-cora", "[8,4,8,8]", 1)]


LEVEL = "[8,4,8,8]"


def _problem(*_: object) -> Problem:
    batch = torch.randn(64, 32), torch.zeros(64, dtype=torch.long)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    return Problem(model, lambda pair: (model(pair[0]), pair[1]), iter(lambda: batch, None), [])


def test_a_tasks_rows_take_the_place_of_its_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "make", _problem)
    monkeypatch.setattr(steps, "locate", lambda task, roots: [])
    path = tmp_path / "steps.csv"
    path.write_text(as_csv([{"task": task, "setting": "gact", "ms": 1.0} for task in ("sst2", "vit")]))
    pairs = [("sst2", FP32), ("sst2", LEVEL)]
    steps.time_steps(load_suite(), pairs, [], tmp_path, 2, path)
    results = steps.read_steps(path)
    assert set(results) == {("vit", "gact"), ("sst2", FP32), ("sst2", LEVEL)}
    assert results["vit", "gact"] == 1.0
    assert results["sst2", LEVEL] > 0
