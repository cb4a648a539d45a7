"""Fairseq's translation models, by analysis.experiments.train.

Autocast and policies act on training and validation; the test text is translated by the trained weights in float32, a
converted model's at its last level.
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from analysis.evidence.loop import Result
from analysis.evidence.suite import Setting, Task
from analysis.experiments.data import Data
from analysis.experiments.text import read_lines
from analysis.experiments.train import FLOAT, Training, run
from dsq.command import make_folder, turn_at, write_text

USER = Path(__file__).with_name("fairseq_user") / "dsq_evidence"
#: the variable of the environment that USER reads
SETTING = "DSQ_EVIDENCE_SETTING"
SPLITS = ("train", "valid", "test")


def translate(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Result:
    """Train and translate. The data are prepared once, in a folder of ``work``, for all runs of the same files."""
    prepared = work / f"{files[0].name.partition('.')[0]} {task.sizes.get('pairs', 'all')}"
    make_folder(prepared)
    with tempfile.TemporaryDirectory(dir=work, prefix="fairseq-") as folder, _environment(setting):
        with turn_at(prepared):
            _write_text(task, files, prepared / "text")
        columns = f"{task.source},en"
        vocab = task.sizes.get("vocab", 4000)
        training = Training(
            Data("parallel", str(prepared / "text"), source=task.source, columns=columns, vocab=vocab),
            levels=setting.levels or FLOAT,
            flags=tuple(flags(task, setting, seed)),
            prepared=str(prepared),
        )
        results = run(training, Path(folder) / "run")
    return Result(math.log(2) * results["valid_loss"][-1][1], results["bleu"])


def flags(task: Task, setting: Setting, seed: int) -> list[str]:
    """The flags of dsq-train, but for its levels."""
    schedule = {"lr": task.rate, "lr-scheduler": "polynomial_decay", "warmup-updates": task.updates // 3}
    length = {"total-num-update": task.updates, "max-update": task.updates, "max-epoch": 0}
    data = {"max-tokens": task.batch, "validate-interval": 1000, "validate-interval-updates": task.updates // 3}
    given = {**schedule, **length, **data, "dropout": task.dropout or 0.1, "seed": seed}
    if setting.levels:
        given |= {"dsq-stash": setting.stash, "dsq-format": setting.format, "dsq-rounding": setting.rounding}
    if setting.rise_at is not None:
        given["dsq-rise-at"] = setting.rise_at
    extra = ["--user-dir", str(USER)] if setting.autocast or setting.policies else []
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in task.sizes.items() if "coder" in name]
    return ["--cpu", *sizes, *extra, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def _write_text(task: Task, files: Sequence[Path], folder: Path) -> None:
    """Write each split of the task's cut: every n-th pair, so that the cut is as long and as short as the whole."""
    folder.mkdir(exist_ok=True)
    for split, file in zip(SPLITS, files, strict=True):
        pairs = [line for line in read_lines(file) if line]
        wanted = task.sizes.get("pairs" if split == "train" else "held_out", len(pairs))
        write_text(folder / f"{split}.tsv", "\n".join(pairs[:: len(pairs) // wanted][:wanted]) + "\n")


@contextlib.contextmanager
def _environment(setting: Setting) -> Iterator[None]:
    """Tell the user directory which setting it is to put on the model."""
    os.environ[SETTING] = json.dumps(asdict(setting))
    try:
        yield
    finally:
        del os.environ[SETTING]
