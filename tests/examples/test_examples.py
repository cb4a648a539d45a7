"""The examples run, in few steps, and show what they say they show."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.threads import threads

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield


def shown(name: str, **options: Any) -> dict[str, Any]:
    """Run the example's main, by its path: other packages install folders that are called "examples" too."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)


def test_the_plain_loop_rises_at_a_plateau_and_goes_on_learning():
    losses = shown("plain_loop")
    first, second = losses["[4,3,3,8]"], losses["[8,4,4,8]"]
    assert first[-1] < first[0]
    assert min(second) < min(first)


def test_the_gpt_and_the_vision_transformer_learn_with_a_packed_stash():
    gpt, classifier = shown("char_gpt", steps=30), shown("vit_classifier", steps=40)
    assert gpt["last"] < 0.8 * gpt["first"]
    assert classifier["accuracy"] > 0.5  # chance is 0.25
    assert all(results["packed_bytes"] < 0.25 * results["fp32_bytes"] for results in (gpt, classifier))


def test_two_processes_train_as_one():
    results = shown("distributed")
    assert results["losses"][-1] < 0.8 * results["losses"][0]
    program = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *program, EXAMPLES / "distributed.py", "--engine", "ddp"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses == pytest.approx(results["losses"], rel=1e-4)
    assert results["levels"][-1] == 1


def test_fairseq_translates_from_text_to_text():
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    program = [sys.executable, EXAMPLES / "fairseq_translation.py", "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "validation loss" in line]
    assert losses[-1] < losses[0]
    assert "BLEU4" in done.stdout


def test_every_example_is_tested_and_fits_a_screen_or_two():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"plain_loop", "char_gpt", "vit_classifier", "fairseq_translation", "distributed"}
    assert all(len(path.read_text().splitlines()) <= 100 for path in EXAMPLES.glob("*.py"))
