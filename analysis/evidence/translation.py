"""Fairseq's translation models, by analysis.translation.training.

Autocast and policies act on training and validation; the test text is translated by the trained weights in float32, a
converted model's at its last level.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from analysis.evidence.loop import Result
from analysis.evidence.suite import Setting, Task
from analysis.translation.text import read_pairs
from analysis.translation.training import SPLITS, Text, prepare, train

USER = Path(__file__).with_name("fairseq_user") / "dsq_evidence"
#: the variable of the environment that USER reads
SETTING = "DSQ_EVIDENCE_SETTING"


def translate(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Result:
    """Train and translate. The text is prepared once, in a folder of ``work``, for all runs on it."""
    wanted = [task.sizes.get("pairs" if split == "train" else "held_out") for split in SPLITS]
    pairs = {split: read_pairs(file, some) for split, file, some in zip(SPLITS, files, wanted, strict=True)}
    text = Text(pairs, task.source, task.target, task.sizes.get("vocab", 4000))
    binary, user = prepare(text, work), {SETTING: json.dumps(asdict(setting))}
    with tempfile.TemporaryDirectory(dir=work, prefix="fairseq-") as folder, patch.dict(os.environ, user):
        given = flags(task, setting, seed)
        found = train(text, binary, Path(folder) / "run", setting.levels, given, task.sizes.get("beam", 4))
    return Result(math.log(2) * found.valid_losses[-1][1], found.bleu)


def flags(task: Task, setting: Setting, seed: int) -> list[str]:
    """The flags of dsq-train, but for its levels."""
    schedule = {"lr": task.rate, "lr-scheduler": "polynomial_decay", "warmup-updates": task.updates // 3}
    length = {"total-num-update": task.updates, "max-update": task.updates, "max-epoch": 0}
    data = {"max-tokens": task.batch, "validate-interval": 1000, "validate-interval-updates": task.updates // 3}
    given = {"cpu": True, **schedule, **length, **data, "dropout": task.dropout or 0.1, "seed": seed, **task.flags}
    given |= {f"{name.replace('_', '-')}": value for name, value in task.sizes.items() if "coder" in name}
    if setting.levels:
        given |= {f"dsq-{name.replace('_', '-')}": value for name, value in setting.converting.items()}
    if setting.autocast or setting.policies:
        given["user-dir"] = USER
    return _words(given)


def _words(given: Mapping[str, Any]) -> list[str]:
    """Flags as words: True stands for a flag without a value, False for none."""
    pairs = [(f"--{name}", value) for name, value in given.items() if value is not False]
    return [word for name, value in pairs for word in ([name] if value is True else [name, str(value)])]
