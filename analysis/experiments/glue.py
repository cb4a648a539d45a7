"""Sentence classification with DSQ (the paper's GLUE path): a RoBERTa encoder on any table of labelled sentences.

    python -m analysis.experiments.glue --data DIR --task sst2 --out RUN
    python -m analysis.experiments.glue --data DIR --task rte --out RUN --dsq-levels none --max-epoch 10

DIR holds TASK.train.tsv and TASK.dev.tsv, plain or .xz or .gz, each with a header of label and sentence, or label,
sentence1 and sentence2; or TASK/train.tsv and so on, as GLUE's archives unpack. The encoder starts from random weights
and is small enough for two CPU cores, so accuracies are far from those of fine-tuning RoBERTa-base: for that, give
--pretrained with fairseq's model, and its sizes as flags (recipes/roberta_mnli_table1.toml has them).

labelled sentences -> BPE (sentencepiece) -> dsq-preprocess -> dsq-train -> accuracy on dev -> RUN/results.json
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from analysis.experiments.text.labelled import LabelledSentences, read_labelled
from analysis.experiments.text.sameness import check_same
from analysis.experiments.text.subwords import train_bpe
from analysis.experiments.training.fairseq_run import command_line, fairseq, records, show
from analysis.experiments.training.flags import FLOAT, TrainingFlags
from analysis.experiments.training.results import level_table, losses, write_json
from dsq.command.files import make_folder, refuse_used
from dsq.command.parser import guarded

PROG = "python -m analysis.experiments.glue"
FLAGS = TrainingFlags(
    fixed="""
        --task sentence_prediction --criterion sentence_prediction --max-positions 256 --shorten-method truncate
        --init-token 0 --separator-token 2 --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric""",
    own="--num-classes --criterion --init-token --separator-token",
    defaults="""
        --arch roberta --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256
        --encoder-attention-heads 4 --dropout 0.1 --pooler-dropout 0.1 --optimizer adam --adam-betas (0.9,0.98)
        --weight-decay 0.01 --clip-norm 1.0 --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 300 --batch-size 64
        --max-epoch 4 --validate-interval-updates 200 --dsq-patience 3 --seed 1 --num-workers 0 --log-interval 50""",
)
check_flags = FLAGS.check
#: the files of a pretrained RoBERTa
PRETRAINED = ("model.pt", "dict.txt", "encoder.json", "vocab.bpe")
#: SHA-256 of those that are GPT-2's, as tiktoken_ext/openai_public.py of github.com/openai/tiktoken has them
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def prepare(tables: dict[str, LabelledSentences], vocab: int, out: Path, pretrained: Path | None = None) -> None:
    """Write ``out/binary``, as fairseq's sentence_prediction reads it: input0, input1 if there are pairs, label.

    Subwords are learnt of the training sentences, or those of ``pretrained``.
    """
    words = {label for table in tables.values() for label in table.labels if len(label.split()) != 1}
    if words:
        raise ValueError(f"--data: a label must be one word, got {min(words)!r}")  # fairseq's labels are words
    pieces = out / "pieces"
    if pretrained:
        encode = _pretrained_pieces(pretrained, pieces)
    else:
        encode = _own_pieces(train_bpe([line for one in tables["train"].inputs for line in one], vocab), pieces)
    for split, table in tables.items():
        for number, column in enumerate(table.inputs):
            _write(pieces / f"{split}.input{number}", [" ".join(encode(sentence)) for sentence in column])
        _write(pieces / f"{split}.label", table.labels)
    dictionary = ["--srcdict", str(pieces / "dict.txt")]
    for part in [*(f"input{number}" for number in range(len(tables["train"].inputs))), "label"]:
        prefixes = [f"--{split}pref={pieces / split}.{part}" for split in tables]
        given = ["--only-source", *prefixes, *(dictionary if part != "label" else [])]
        fairseq("preprocess", [*given, "--destdir", str(out / "binary" / part)], out / "preprocess.log")


def _own_pieces(bpe: SentencePieceProcessor, pieces: Path) -> Callable[[str], list[str]]:
    """What cuts a sentence; ``pieces`` gets the model and its dict.txt."""
    pieces.mkdir(parents=True, exist_ok=True)
    (pieces / "bpe.model").write_bytes(bpe.serialized_model_proto())
    words = [bpe.id_to_piece(number) for number in range(bpe.get_piece_size())]
    special = {"<unk>", "<s>", "</s>"}  # fairseq puts its own in front
    (pieces / "dict.txt").write_text("".join(f"{word} 1\n" for word in words if word not in special), encoding="utf-8")
    return lambda sentence: bpe.encode(sentence, out_type=str)


def _pretrained_pieces(pretrained: Path, pieces: Path) -> Callable[[str], list[str]]:
    """The same of fairseq's RoBERTa, whose pieces are numbers of GPT-2's."""
    import fairseq_plugin  # noqa: F401 - its shims, before fairseq

    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder  # isort: skip

    bpe = get_encoder(str(pretrained / "encoder.json"), str(pretrained / "vocab.bpe"))
    pieces.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(pretrained / "dict.txt", pieces / "dict.txt")
    return lambda sentence: [str(number) for number in bpe.encode(sentence)]


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_tables(data: Path, task: str) -> dict[str, LabelledSentences]:
    """The train and the dev table. Raises ValueError."""
    train, dev = (read_labelled(data, task, split) for split in ("train", "dev"))
    if len(train.inputs) != len(dev.inputs):
        raise ValueError(f"--data {data}: the train and the dev table of {task} have other columns of sentences")
    unknown = set(dev.labels) - set(train.labels)
    if unknown:
        raise ValueError(f"--data {data}: the dev table of {task} has labels that train has not: {min(unknown)!r}")
    return {"train": train, "valid": dev}


def is_prepared(folder: Path) -> bool:
    """Whether ``prepare`` has ended there."""
    return (folder / "binary" / "label" / "valid.idx").exists()


def run(
    data: Path,
    task: str,
    out: Path,
    vocab: int,
    levels: str,
    training: list[str],
    resume: bool = False,
    prepared: Path | None = None,
    pretrained: Path | None = None,
) -> dict[str, Any]:
    """The whole recipe; returns what it writes to ``out/results.json``. Raises ValueError for the user's mistakes.

    resume: go on from the last checkpoint in ``out``. prepared: where runs share the binarised data; None: in ``out``.
    pretrained: folder of fairseq's RoBERTa (PRETRAINED), whose subwords and weights are taken.
    """
    if not resume:
        refuse_used(out, ", or --resume")
    tables = read_tables(data, task)
    classes = sorted(set(tables["train"].labels))
    check_flags(levels, training)
    make_folder(out)
    started = time.perf_counter()
    folder = prepared or out
    if not is_prepared(folder):
        prepare(tables, vocab, folder, pretrained)
    sha256 = check_same(tables, folder)
    more = ["--num-classes", str(len(classes))]
    more += ["--finetune-from-model", str(pretrained / "model.pt")] if pretrained else []
    arguments = FLAGS.arguments(folder / "binary", out / "checkpoints", levels, training, more)
    fairseq("train", arguments, out / "train.log", watch=show)
    found = {int(one["valid_num_updates"]): one for one in records(out / "train.log", "valid")}
    accuracies = [(update, float(one["valid_accuracy"])) for update, one in sorted(found.items())]
    results = measured(tables, classes, accuracies, losses(out / "train.log", "valid", "valid_"), started)
    results["text_sha256"] = sha256
    history = out / "checkpoints" / "dsq_history.json"
    if levels != FLOAT:
        results["history"] = json.loads(history.read_text(encoding="utf-8"))
    write_json(results, out / "results.json")
    return results


def measured(
    tables: dict[str, LabelledSentences],
    classes: list[str],
    accuracies: list[tuple[int, float]],
    valid_losses: list[tuple[int, float]],
    started: float,
) -> dict[str, Any]:
    """What results.json says of a run that began at ``started``, but its history."""
    return {
        "command": command_line(),
        "sentences": {split: len(table.labels) for split, table in tables.items()},
        "classes": classes,
        "majority": majority(tables["valid"].labels),
        "accuracy": accuracies[-1][1],
        "best_accuracy": max(accuracy for _, accuracy in accuracies),
        "accuracies": accuracies,
        "valid_loss": valid_losses,
        "seconds": {"total": round(time.perf_counter() - started, 1)},
    }


def majority(labels: list[str]) -> float:
    """The accuracy of always giving the commonest class, in %."""
    return round(100 * max(map(labels.count, set(labels))) / len(labels), 1)


def summary(results: dict[str, Any]) -> str:
    """What a person reads at the end."""
    lines = [
        f"dev accuracy {results['accuracy']:.1f} at the end, {results['best_accuracy']:.1f} at best "
        f"(always the commonest class: {results['majority']:.1f})"
    ]
    return "\n".join([*lines, *(["", level_table(results)] if "history" in results else [])])


def main(arguments: list[str] | None = None) -> int:
    top = FLAGS.parser(PROG, __doc__)
    top.add_argument("--task", required=True, help="what the tables' names begin with: sst2, rte, mrpc, ...")
    files = f"fine-tune fairseq's RoBERTa: {', '.join(PRETRAINED)}"
    top.add_argument("--pretrained", type=Path, metavar="DIR", help=files)
    given, training = top.parse_known_args(arguments)
    return guarded(PROG, lambda: print(summary(run(**vars(given), training=training))))


if __name__ == "__main__":
    sys.exit(main())
