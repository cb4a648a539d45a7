"""Fine-tuning by Hugging Face's Trainer, of a tiny BERT with a vocabulary of its own."""

import json
from pathlib import Path

import pytest

from analysis.experiments import finetune

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model and one of tables, good films and bad ones."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    for split, count in (("train", 16), ("dev", 4)):
        rows = ["label\tsentence", *["1\tgood film", "0\tbad film"] * count]
        (tmp_path / f"toy.{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


def command(folder: Path, *flags: str) -> int:
    given = ["--data", folder, "--task", "toy", "--pretrained", folder / "model", "--out", folder / "run"]
    sizes = ["--batch-size", "4", "--validate-interval-updates", "2", "--lr", "0.001", "--warmup-updates", "0"]
    return finetune.main([*map(str, given), *sizes, *flags])


def test_it_trains_through_a_rise_and_resumes(folder: Path, capsys: pytest.CaptureFixture) -> None:
    schedule = ["--dsq-levels", "[4,4,4,16] [16,4,4,16]", "--dsq-rise-at", "4"]
    assert command(folder, "--max-update", "8", *schedule) == 0
    (folder / "run" / "checkpoint-10").mkdir()  # as of a run that was killed while it saved
    assert command(folder, "--max-update", "12", *schedule, "--resume") == 0
    assert "[16,4,4,16]" in capsys.readouterr().out
    results = json.loads((folder / "run" / "results.json").read_text(encoding="utf-8"))
    assert [update for update, _ in results["accuracies"]] == list(range(2, 13, 2))
    levels = results["history"]["levels"]
    assert [level["updates"] for level in levels] == [4, 8]
    # each level once, of one layer's six linears and two behind it; the first session's figures are the checkpoint's
    assert [(level["linears_called"], level["stash_steps"]) for level in levels] == [(8, 1), (8, 1)]
    assert all(level["stash_bytes"] < 0.3 * level["stash_bytes_fp32"] for level in levels)
    assert results["majority"] == 50


def test_what_no_training_could_use_is_refused_in_the_plan() -> None:
    with pytest.raises(ValueError, match="--dsq-rise-at must be 0 numbers for 1 levels, got 1"):
        finetune.check_flags("[4,4,4,8]", ["--dsq-rise-at", "0.8"])


def test_epochs_have_a_part_at_which_the_level_rises(folder: Path) -> None:
    schedule = ["--dsq-levels", "[4,4,4,16] [16,4,4,16]", "--dsq-rise-at", "0.75"]
    assert command(folder, "--max-epoch", "2", *schedule) == 0
    results = json.loads((folder / "run" / "results.json").read_text(encoding="utf-8"))
    assert [level["updates"] for level in results["history"]["levels"]] == [12, 4]  # of 32 sentences, 4 an update
