"""RoBERTa's sentence_prediction (the GLUE path): its head is quantised too, the level rises, a run resumes."""

import json
import random
from pathlib import Path

import pytest
import torch

import dsq
from tests.fairseq_plugin.harness import LEVELS, levels, run, weights

ROBERTA = [
    *("--arch", "roberta", "--encoder-layers", "2", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64"),
    *("--encoder-attention-heads", "2", "--max-positions", "32", "--task", "sentence_prediction", "--num-classes", "2"),
    *("--criterion", "sentence_prediction", "--init-token", "0", "--separator-token", "2", "--optimizer", "adam"),
    *("--batch-size", "16", "--lr", "0", "--num-workers", "0", "--no-epoch-checkpoints", "--cpu", "--no-progress-bar"),
]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences that are good or bad."""
    folder, draw = tmp_path_factory.mktemp("glue"), random.Random(0)
    for name, count in (("train", 64), ("valid", 16)):
        labels = [draw.choice(["good", "bad"]) for _ in range(count)]
        lines = [f"{draw.choice(['this', 'that'])} {draw.choice(['film', 'play'])} is {label}" for label in labels]
        (folder / f"{name}.input0").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.label").write_text("\n".join(labels) + "\n")
    for part in ("input0", "label"):
        prefixes = [f"--{name}pref={folder / name}.{part}" for name in ("train", "valid")]
        run("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin" / part)
    return folder / "bin"


def test_sentence_prediction(sentences: Path, tmp_path: Path, calls) -> None:
    given = [sentences, *ROBERTA, "--save-interval-updates", 1, "--dsq-patience", 1, "--save-dir", tmp_path]
    run("train", *given, "--dsq-levels", LEVELS, "--max-update", 2)
    assert {str(call.quantizers.precision) for call in calls} == {"[2,2,2,16]"}
    assert any(call.weight.shape == (2, 32) for call in calls)  # the head's projection to two classes
    calls.clear()
    run("train", *given, "--dsq-levels", LEVELS, "--max-update", 3)
    assert {str(call.quantizers.precision) for call in calls} == {"[16,4,4,16]"}  # raised by the second validation

    first, second = levels(tmp_path)
    assert (first["updates"], second["updates"]) == (2, 1)
    described = {entry["name"] for entry in json.loads((tmp_path / "dsq_workload.json").read_text())["operations"]}
    assert "classification_heads.sentence_classification_head.out_proj" in described
    assert not any("lm_head" in name for name in described)  # which is no part of this training
    state = weights(tmp_path)["dsq._extra_state"]
    assert dsq.Precision(*state["config"]["levels"][state["trained_level"]]) == dsq.Precision(16, 4, 4, 16)


def test_fine_tuning_starts_at_the_first_level(sentences: Path, tmp_path: Path) -> None:
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    run("train", sentences, *ROBERTA, "--max-update", 1, "--save-dir", plain)
    given = ["--finetune-from-model", plain / "checkpoint_last.pt", "--dsq-levels", LEVELS, "--save-dir", tuned]
    run("train", sentences, *ROBERTA, "--max-update", 1, *given)
    before, after = weights(plain), weights(tuned)
    assert after.pop("dsq._extra_state")["scheduler"]["level"] == 0
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())  # --lr 0
