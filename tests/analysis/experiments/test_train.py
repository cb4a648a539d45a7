"""One training: its log, what it refuses, and the whole of it on labelled sentences; translation: test_run.py."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments import data, run, train
from analysis.experiments.data import Data
from analysis.experiments.fairseq_run import hypotheses, progress, records
from analysis.experiments.recipe import RECIPES
from analysis.experiments.text import LabelledSentences
from analysis.experiments.train import Training
from tests.analysis.experiments.roberta import write_roberta

SMALL = ["--encoder-layers", "1", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32", "--cpu"]


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
    given = Training(Data("parallel", "text"), flags=("--patience", "3"))
    for one in (given, given, dataclasses.replace(given, flags=("--patience", "4"))):
        train._train(one, {}, tmp_path, tmp_path)
    assert trained == ["3", "4"]


def write_table(path: Path, count: int, seed: int) -> None:
    """Sentences that are good or bad."""
    draw, rows = random.Random(seed), ["label\tsentence"]
    for _ in range(count):
        label = draw.choice(["good", "bad"])
        rows.append(f'{label}\t{draw.choice(["this", "that"])} {draw.choice(["film", "play"])} "is {label}')
    path.write_text("\n".join(rows) + "\n")


def test_classification_from_tables_to_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_table(tmp_path / "toy.train.tsv", 64, 0)
    write_table(tmp_path / "toy.dev.tsv", 16, 1)
    out = tmp_path / "run"
    given = ["--data", str(tmp_path), "--task", "toy", "--out", str(out), "--vocab", "30", *SMALL]
    given += ["--max-epoch", "1", "--batch-size", "16"]
    assert train.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[8,4,4,8]: 4 updates" in lines
    assert f"costs: dsq-cost estimate --history {out / 'checkpoints' / 'dsq_history.json'}" in lines
    results = json.loads((out / "results.json").read_text())
    assert results["sentences"] == {"train": 64, "valid": 16}
    assert 0 <= results["accuracy"] <= results["best_accuracy"] <= 100
    assert [update for update, _ in results["accuracies"]] == [4]
    assert 50 <= results["majority"] < 100

    assert train.main(given) == 2
    assert f"go on with it: {train.PROG} --resume {out}" in capsys.readouterr().err
    (out / "results.json").unlink()
    assert train.main(["--resume", str(out)]) == 0
    assert json.loads((out / "results.json").read_text())["accuracies"] == results["accuracies"]
    assert train.main(["--resume", str(tmp_path)]) == 2


def test_a_label_of_two_words_is_refused(tmp_path: Path) -> None:
    table = LabelledSentences(["same", "not same"], [["x", "y"]])
    with pytest.raises(ValueError, match="a label must be one word, got 'not same'"):
        data._binarise_tables(Data("labelled", "x", task="x"), {"train": table, "valid": table}, tmp_path)


@pytest.mark.soak
def test_a_pretrained_roberta_is_fine_tuned_by_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHA256", {})  # subwords of a few letters are not GPT-2's
    (tmp_path / "QNLI").mkdir()
    for split, count in (("train", 20), ("dev", 4)):
        rows = "".join(f'{i}\ta "b {i}\t{"a" if i % 2 else "c"} "b {i}\t{i % 2}\n' for i in range(count))
        (tmp_path / "QNLI" / f"{split}.tsv").write_text(f"index\tquestion\tsentence\tlabel\n{rows}")
    weights = write_roberta(tmp_path / "roberta", 16)
    sizes = ("encoder-layers=1", "encoder-embed-dim=16", "encoder-ffn-embed-dim=16", "encoder-attention-heads=2")
    more = ("cpu=true", "max-epoch=2", "batch-size=4", "validate-interval-updates=2", *sizes)
    changes = [*(f"training.{change}" for change in more), f'data.pretrained="{weights}"']
    run.run_recipe(
        RECIPES / "roberta_qnli_table1.toml", tmp_path / "out", data=tmp_path, changes=changes, only=["snvint*"]
    )
    (log,) = (tmp_path / "out").glob("snvint*/train.log")
    assert f"loading pretrained model from {weights / 'model.pt'}" in log.read_text()
    pieces = tmp_path / "out" / "data" / "pieces"
    assert (pieces / "dict.txt").read_bytes() == (weights / "dict.txt").read_bytes()
    assert (pieces / "train.input0").read_text().startswith("0 14 3 1 14 4\n")  # a _ " b _ 0
