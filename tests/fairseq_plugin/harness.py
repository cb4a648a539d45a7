"""A tiny parallel corpus, and fairseq's commands called in this process or in one of their own."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_plugin import commands  # before fairseq: its shims

from fairseq import checkpoint_utils  # isort: skip

ROOT = Path(__file__).parents[2]
NOUNS = ["hund", "katze", "vogel", "fisch", "baum", "haus", "kind", "buch", "stein", "fluss"]
VERBS = ["sieht", "findet", "nimmt", "kennt"]
LEVELS = "[2,2,2,16] [16,4,4,16]"
#: a model of 2+2 layers and 33 linears, and a quiet log
MODEL = [
    *("--arch", "transformer", "--encoder-layers", "2", "--decoder-layers", "2", "--share-decoder-input-output-embed"),
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64", "--encoder-attention-heads", "2"),
    *("--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "2"),
    *("--task", "translation", "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam", "--lr", "0.002"),
    *("--dropout", "0.1", "--max-tokens", "256", "--num-workers", "0", "--no-epoch-checkpoints", "--cpu"),
    *("--no-progress-bar", "--log-format", "simple", "--log-interval", "1"),
]


def sentence_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """German and a word-for-word other language: the object after the verb here, before it there."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        subject, verb, objects = draw.choice(NOUNS), draw.choice(VERBS), draw.choices(NOUNS, k=draw.randint(1, 5))
        pairs.append((" ".join([subject, verb, *objects]), " ".join(w.upper() for w in [subject, *objects, verb])))
    return pairs


def write_pairs(prefix: Path, pairs: list[tuple[str, str]]) -> None:
    for language, lines in zip(("de", "xx"), zip(*pairs, strict=True), strict=True):
        prefix.with_suffix(f".{language}").write_text("\n".join(lines) + "\n")


def run(command: str, *arguments: object) -> None:
    """dsq-``command`` in this process, as if in a fresh one."""
    for memory in ("best", "num_runs"):
        vars(checkpoint_utils.save_checkpoint).pop(memory, None)
    before = sys.argv
    sys.argv = [command, *map(str, arguments)]
    try:
        getattr(commands, command)()
    finally:
        sys.argv = before


def refusal(capsys: pytest.CaptureFixture, command: str, *arguments: object) -> str:
    """The one line of standard error with which the command refuses."""
    with pytest.raises(SystemExit) as exit_:
        run(command, *arguments)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " | INFO | " not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"dsq-{command}: error: ")
    return lines[0]


def levels(folder: Path) -> list[dict[str, Any]]:
    """Read each level of a run's record."""
    return json.loads((folder / "dsq_history.json").read_text())["levels"]


def updates(folder: Path) -> list[int]:
    """The updates at each level, as the record of a run has them."""
    return [level["updates"] for level in levels(folder)]


def weights(folder: Path) -> dict[str, Any]:
    """The model in the last checkpoint of a run."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def resume(data: Path, flags: Sequence[object], whole: Path, name: str) -> Path:
    """The folder beside ``whole`` of a run that goes on from this checkpoint of it."""
    folder = whole.with_name("resumed")
    folder.mkdir()
    (whole / name).rename(folder / "checkpoint_last.pt")
    run("train", data, *flags, "--save-dir", folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def start(*program: object, **environment: str) -> subprocess.Popen:
    """Python with the arguments ``program``, in a process of its own."""
    words, environment = [sys.executable, *map(str, program)], {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=ROOT, env=environment, **output)
