"""Steps are timed of the pairs asked for; a task's rows take the place of its earlier ones."""

from pathlib import Path

import pytest
import torch

from analysis.evidence import problems, steps
from analysis.evidence.loop import Problem
from analysis.evidence.suite import FP32, load_suite
from dsq.command import as_csv

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
    found = steps.read_steps(path)
    assert set(found) == {("vit", "gact"), ("sst2", FP32), ("sst2", LEVEL)}
    assert found["vit", "gact"] == 1.0
    assert found["sst2", LEVEL] > 0
