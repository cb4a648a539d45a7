"""Full-size recipes from archive to report, on a slice: tiny archives of the official form, a tiny model by --set."""

import math
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments import glue, prepare, report, run
from analysis.experiments.ledger.ledger import Row, read_ledger
from analysis.experiments.plan.experiment import RECIPES
from tests.analysis.experiments import archives
from tests.fairseq_plugin.harness import sentence_pairs

ENCODER = ("encoder-layers=1", "encoder-embed-dim=16", "encoder-ffn-embed-dim=16", "encoder-attention-heads=2")
DECODER = tuple(size.replace("encoder", "decoder") for size in ENCODER)
TRANSLATION = ("data.vocab=60", "data.beam=1", *(f"training.{size}" for size in (*ENCODER, *DECODER)))
CLASSIFICATION = tuple(f"training.{size}" for size in (*ENCODER, "batch-size=4", "validate-interval-updates=2"))
TRAINING, HELD_OUT = sentence_pairs(47, seed=1), sentence_pairs(3, seed=2)


def ledger_row(recipe: str, corpus: str, given: Path, folder: Path, *changes: str) -> Row:
    """What a ledger has of the schedule that we advise, after ``prepare``, ``run`` and ``report``."""
    assert prepare.main([corpus, str(given), "--out", str(folder / "data")]) == 0
    changed = [f"--set={change}" for change in ("training.cpu=true", "training.max-epoch=2", *changes)]
    out = ["--data", str(folder / "data"), "--out", str(folder / "out")]
    assert run.main([str(RECIPES / f"{recipe}.toml"), *out, "--only", "snvint*", *changed]) == 0
    ledger = folder / "out" / "ledger.csv"
    assert report.main([str(ledger)]) == 0
    assert "[4,3,3,8] [8,4,4,8]" in (folder / "out" / "report.md").read_text()
    (row,) = read_ledger(ledger)
    return row


def check(row: Row, recipe: str, measure: str) -> None:
    """The row is whole: a score, a rise at four fifths of two epochs, the stash of both levels, what was changed."""
    assert (row["recipe"], row["measure"], row["label"]) == (recipe, measure, "Advised")
    assert 0 <= float(row["score"]) <= 100
    first, second = map(int, row["level_updates"].split())
    assert first == math.ceil(0.8 * (first + second)) < first + second
    stash, plain = (list(map(int, row[name].split())) for name in ("stash_bytes", "stash_bytes_fp32"))
    assert stash[0] / plain[0] < stash[1] / plain[1] < 0.3
    assert 0.0217 < float(row["arithmetic"]) < 0.0331
    assert "training.max-epoch=2; " in row["set"]
    assert "--max-epoch 2" in row["training"]


@pytest.mark.soak
def test_iwslt17(tmp_path: Path, accept) -> None:
    sets = [f"TED.{name}" for name in ("dev2010", *(f"tst201{year}" for year in range(6)))]
    given = archives.iwslt(tmp_path / "de-en.tgz", 17, sets, TRAINING, HELD_OUT)
    accept("iwslt17", given)
    few = "training.max-tokens=100"
    check(ledger_row("iwslt17_table1", "iwslt17", given, tmp_path, *TRANSLATION, few), "iwslt17_table1", "BLEU")


@pytest.mark.soak
def test_iwslt14(tmp_path: Path, accept) -> None:
    sets = [*(f"TED.{name}" for name in ("dev2010", "tst2010", "tst2011", "tst2012")), "TEDX.dev2012"]
    given = archives.iwslt(tmp_path / "de-en.tgz", 14, sets, TRAINING, HELD_OUT)
    accept("iwslt14", **{"test.de": 15, "test.en": 15})
    few = "training.max-tokens=100"
    check(ledger_row("iwslt14_table4_5", "iwslt14", given, tmp_path, *TRANSLATION, few), "iwslt14_table4_5", "BLEU")


@pytest.mark.soak
def test_wmt14(tmp_path: Path, accept) -> None:
    given = archives.wmt14(tmp_path / "wmt", TRAINING, HELD_OUT)
    accept("wmt14", **{"train.en": 47})
    few = "training.max-tokens=30"  # of which four batches are an update
    check(ledger_row("wmt14_table6", "wmt14", given, tmp_path, *TRANSLATION, few), "wmt14_table6", "BLEU")


@pytest.mark.parametrize(
    ("task", "dev", "columns"),
    [
        ("qnli", "dev", ("question", "sentence", "label")),
        pytest.param("mnli", "dev_matched", ("sentence1", "sentence2", "gold_label"), marks=pytest.mark.soak),
    ],
)
def test_glue_with_roberta(tmp_path: Path, accept, monkeypatch, task: str, dev: str, columns) -> None:
    monkeypatch.setattr(glue, "SHA256", {})  # subwords of a few letters are not GPT-2's
    given = archives.glue(tmp_path / f"{task}.zip", task.upper(), dev, columns, 20, 4)
    accept(task, given)
    weights = archives.roberta(tmp_path / "roberta", 16)
    changes = (*CLASSIFICATION, f'data.pretrained="{weights}"')
    row = ledger_row(f"roberta_{task}_table1", task, given, tmp_path, *changes)
    check(row, f"roberta_{task}_table1", "accuracy")
    (log,) = (tmp_path / "out").glob("snvint*/train.log")
    assert f"loading pretrained model from {weights / 'model.pt'}" in log.read_text()
    pieces = tmp_path / "out" / "data" / "pieces"
    assert (pieces / "dict.txt").read_bytes() == (weights / "dict.txt").read_bytes()
    assert (pieces / "train.input0").read_text().startswith("0 14 3 1 14 4\n")  # a _ " b _ 0
