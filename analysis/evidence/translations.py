"""Translations of the suite, which fairseq's own loop trains: to a score, by its commands; to a time, step by step."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from analysis import make_folder
from analysis.evidence.loop import Result, apply_policies, autocast
from analysis.evidence.suite import Setting, Task
from analysis.translation import training
from analysis.translation.text import read_pairs

USER = Path(__file__).with_name("fairseq_user") / "dsq_evidence"
#: the variable of the environment that USER reads
SETTING = "DSQ_EVIDENCE_SETTING"


def train(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Result:
    """Train fairseq's model and translate. The text is prepared once, in a folder of ``work``, for all runs on it.

    Autocast and policies act on training and validation; the test text is translated by the trained weights in float32,
    a converted model's at its last level.
    """
    text, binary = _prepared(task, files, work)
    user = {SETTING: json.dumps(asdict(setting))}
    with tempfile.TemporaryDirectory(dir=work, prefix="fairseq-") as folder, patch.dict(os.environ, user):
        plugin = ["--user-dir", str(USER)] if setting.autocast or setting.policies else []
        arguments = [*flags(task, setting, seed), *plugin]
        result = training.train(
            text, binary, Path(folder) / "run", setting.levels, arguments, task.sizes.get("beam", 4)
        )
    return Result(math.log(2) * result.valid_losses[-1][1], result.bleu)


def _prepared(task: Task, files: Sequence[Path], work: Path) -> tuple[training.Text, Path]:
    limits = [task.sizes.get("pairs" if split == "train" else "held_out") for split in training.SPLITS]
    pairs = {split: read_pairs(file, limit) for split, file, limit in zip(training.SPLITS, files, limits, strict=True)}
    text = training.Text(pairs, task.source, task.target, task.sizes.get("vocab", 4000))
    return text, training.prepare(text, work)


def steps(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Callable[[], Any]:
    """Return the next step of fairseq's trainer under the setting."""
    import fairseq_plugin  # noqa: F401 - its shims, before fairseq

    from fairseq import options, tasks  # isort: skip
    from fairseq.data.iterators import GroupedIterator  # isort: skip
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # isort: skip
    from fairseq.trainer import Trainer  # isort: skip

    binary = _prepared(task, files, work)[1]
    folder = work / f"{task.name}, {setting.name}, timed"
    make_folder(folder)
    words = [*training.own_flags(binary, folder, setting.levels), *flags(task, setting, seed)]
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    of_fairseq = tasks.setup_task(config.task)
    model, criterion = of_fairseq.build_model(config.model), of_fairseq.build_criterion(config.criterion)
    apply_policies(model, setting)
    forward = criterion.forward

    def cast(*arguments: Any, **keywords: Any) -> Any:
        with autocast(setting):
            return forward(*arguments, **keywords)

    criterion.forward = cast
    trainer = Trainer(config, of_fairseq, model, criterion)
    epochs = (GroupedIterator(trainer.get_train_iterator(epoch).next_epoch_itr(), 1) for epoch in count(1))
    batches = chain.from_iterable(epochs)
    trainer.begin_epoch(1)
    return lambda: trainer.train_step(next(batches))


def flags(task: Task, setting: Setting, seed: int) -> list[str]:
    """The flags of dsq-train, but for its levels."""
    schedule = {"lr": task.rate, "lr-scheduler": "polynomial_decay", "warmup-updates": task.updates // 3}
    length = {"total-num-update": task.updates, "max-update": task.updates, "max-epoch": 0}
    data = {"max-tokens": task.batch, "validate-interval": 1000, "validate-interval-updates": task.updates // 3}
    options = {"cpu": True, **schedule, **length, **data, "dropout": task.dropout or 0.1, "seed": seed, **task.flags}
    options |= {f"{name.replace('_', '-')}": value for name, value in task.sizes.items() if "coder" in name}
    if setting.levels:
        options |= {f"dsq-{name.replace('_', '-')}": value for name, value in setting.converting.items()}
    return _words(options)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Flags as words: True stands for a flag without a value, False for none."""
    pairs = [(f"--{name}", value) for name, value in options.items() if value is not False]
    return [word for name, value in pairs for word in ([name] if value is True else [name, str(value)])]
