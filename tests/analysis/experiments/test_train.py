"""One training: its log, and its end; the whole of it: test_run.py."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments import train
from analysis.experiments.data import Data
from analysis.experiments.fairseq_run import hypotheses, progress, records
from analysis.experiments.train import Training


def test_hypotheses_come_back_in_the_order_of_the_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("S-1\tx\nD-1\t-0.1\ttwo words\nH-0\t-1\tno\nD-0\t-0.2\tone\nD-10\t-0.2\tten\n")
    assert hypotheses(log) == ["one", "two words", "ten"]


def test_a_record_behind_one_that_was_cut_off_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('12:00 | INFO | valid | {"valid_num_upd12:01 | INFO | valid | {"valid_loss": "2.5"}\n')
    assert list(records(log, "valid")) == [{"valid_loss": "2.5"}]


def test_progress_shows_validations_and_changes_of_level() -> None:
    valid = '2026-01-01 | INFO | valid | {"valid_loss": "4.1", "valid_num_updates": "25", "valid_dsq_level": "1"}'
    assert progress(valid) == "  update     25  valid loss     4.1  level 1"
    assert progress("x | INFO | t | DSQ level 0 [2,2,2,16] -> 1 [16,4,4,16] at update 9") is not None
    assert progress("x | INFO | fairseq_cli.train | done") is None


def test_a_training_that_has_ended_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed while it translated goes on there: fairseq's --patience would begin to count again."""
    trained: list[str] = []
    monkeypatch.setattr(train, "fairseq", lambda command, arguments, *_, **__: trained.append(arguments[-1]))
    (tmp_path / "checkpoints").mkdir()
    given = Training(Data("parallel", "text"), "none", flags=("--patience", "3"))
    for one in (given, given, dataclasses.replace(given, flags=("--patience", "4"))):
        train._train(one, tmp_path, tmp_path)
    assert trained == ["3", "4"]
