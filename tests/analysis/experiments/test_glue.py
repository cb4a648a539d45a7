"""The GLUE recipe on tiny tables."""

import json
import random
from pathlib import Path

import pytest

from analysis.experiments import glue


def write_table(path: Path, rows: list[tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def pairs(count: int, seed: int) -> list[tuple[str, ...]]:
    """Pairs of sentences that say the same or not."""
    draw, rows = random.Random(seed), [("label", "sentence1", "sentence2")]
    for _ in range(count):
        who, what, other = draw.choice(["hund", "katze"]), *draw.sample(["frisst", "schläft", 'sagt "ja'], 2)
        same = draw.random() < 0.5
        rows.append(("same" if same else "other", f"der {who} {what}", f"es {what if same else other} der {who}"))
    return rows


def test_the_recipe_trains_on_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    write_table(tmp_path / "toy.train.tsv", pairs(64, 0))
    write_table(tmp_path / "toy.dev.tsv", pairs(16, 1))
    small = ["--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32", "--max-epoch", "1", "--batch-size", "16"]
    given = ["--data", tmp_path, "--task", "toy", "--out", tmp_path / "run", "--vocab", 40, *small, "--cpu"]
    assert glue.main([str(word) for word in given]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["[4,4,4,8]", "4"]


def test_fine_tunes_a_roberta_with_its_own_subwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full-size recipe does, up to the training itself."""
    weights, trained = tmp_path / "roberta", []
    weights.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz\u0120"  # GPT-2 writes a space as this letter
    (weights / "encoder.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (weights / "vocab.bpe").write_text("#version: 0.2\n\n")
    (weights / "dict.txt").write_text("".join(f"{n} 1\n" for n in range(len(letters))))
    for split in ("train", "dev"):
        (tmp_path / f"toy.{split}.tsv").write_text("label\tsentence\n1\tone a\n0\tone b\n")

    def fairseq(command: str, arguments: list[str], log: Path, watch: object = None) -> None:
        trained.extend(arguments if command == "train" else [])
        valid = '{"valid_num_updates": "1", "valid_accuracy": "50", "valid_loss": "1"}'
        log.write_text(f"x | INFO | valid | {valid}\n")

    monkeypatch.setattr(glue, "fairseq", fairseq)
    given = ["--data", str(tmp_path), "--task", "toy", "--out", str(tmp_path / "run"), "--dsq-levels", "none"]
    assert glue.main([*given, "--pretrained", str(weights)]) == 0
    assert trained[trained.index("--finetune-from-model") + 1] == str(weights / "model.pt")
    pieces = tmp_path / "run" / "pieces"
    assert (pieces / "dict.txt").read_text() == (weights / "dict.txt").read_text()
    assert (pieces / "train.input0").read_text() == "14 13 4 26 0\n14 13 4 26 1\n"  # o n e _ a
