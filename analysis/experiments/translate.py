"""Translation with DSQ from raw parallel text to BLEU and costs, for any directory of parallel text.

    python -m analysis.experiments.translate --data DIR --out RUN --source de --target en
    python -m analysis.experiments.translate --data DIR --prefix multi30k --out RUN --encoder-layers 6 --max-epoch 30

raw text -> BPE (sentencepiece) -> dsq-preprocess -> dsq-train -> dsq-generate -> BLEU (sacrebleu) -> RUN/results.json
"""

import shlex
import sys
import time
from typing import Any

from analysis.experiments.text.parallel_text import ParallelText, read_parallel
from analysis.experiments.text.sameness import check_same
from analysis.experiments.text.subwords import train_bpe, write_pieces
from analysis.experiments.training.fairseq_run import fairseq, hypotheses, show
from analysis.experiments.training.flags import FLOAT, TrainingFlags
from analysis.experiments.training.results import collect, summary, write_json
from analysis.experiments.training.translation import Translation
from dsq.command.files import make_folder, refuse_used, write_text
from dsq.command.parser import guarded

PROG = "python -m analysis.experiments.translate"
#: by default a model for two CPU cores; checkpoint_best.pt translates, in the direction of --source and --target
FLAGS = TrainingFlags(
    fixed="--task translation --share-all-embeddings",
    own="--task --source-lang -s --target-lang -t --no-save --checkpoint-suffix",
    defaults="""
        --arch transformer --encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 128 --decoder-embed-dim 128
        --encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4
        --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam
        --adam-betas (0.9,0.98) --clip-norm 1.0 --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 400
        --max-tokens 2048 --max-epoch 10 --seed 1 --num-workers 0 --log-interval 20""",
)
check_flags = FLAGS.check


def run(translation: Translation) -> dict[str, Any]:
    """The whole recipe; returns what it writes to RUN/results.json.

    Raises ValueError for what the user can mend: the data, a flag, a run directory that is in use.
    """
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    if not translation.resume:
        refuse_used(translation.out, ", or --resume")
    text = _read(translation)
    make_folder(translation.out)
    sha256 = _prepare(translation, text)
    seconds["prepare"] = time.perf_counter() - started
    _train(translation)
    seconds["train"] = time.perf_counter() - started - sum(seconds.values())
    translations = _generate(translation)
    seconds["generate"] = time.perf_counter() - started - sum(seconds.values())
    results = {**collect(translation, text, translations, seconds), "text_sha256": sha256}
    write_json(results, translation.out / "results.json")
    return results


def prepare(translation: Translation) -> None:
    """Put the binarised data where ``translation`` reads them, if they are not there yet. Raises ValueError."""
    _prepare(translation, _read(translation))


def _is_prepared(translation: Translation) -> bool:
    pair = f"{translation.source}-{translation.target}"
    return (translation.binary / f"test.{pair}.{translation.target}.idx").exists()


def _read(translation: Translation) -> dict[str, ParallelText]:
    text = read_parallel(
        translation.data, translation.source, translation.target, translation.prefix, translation.columns
    )
    return {split: _lower(part) for split, part in text.items()} if translation.lowercase else text


def _lower(text: ParallelText) -> ParallelText:
    return ParallelText([a.lower() for a in text.source], [b.lower() for b in text.target], text.dropped)


def _prepare(translation: Translation, text: dict[str, ParallelText]) -> str:
    """The same, of ``text``, whose SHA-256 it gives. Raises ValueError where the data there are of other text."""
    if not _is_prepared(translation):
        _binarise(translation, text)
    return check_same(text, translation.binary.parent)


def _binarise(translation: Translation, text: dict[str, ParallelText]) -> None:
    sizes = ", ".join(f"{split} {len(part)}" for split, part in text.items())
    print(
        f"preparing {translation.source}-{translation.target}: {sizes} sentence pairs, {translation.vocab} subwords",
        flush=True,
    )
    pieces = translation.binary.with_name("pieces")
    bpe = train_bpe([*text["train"].source, *text["train"].target], translation.vocab)
    pieces.mkdir(parents=True, exist_ok=True)
    (pieces / "bpe.model").write_bytes(bpe.serialized_model_proto())
    for split, part in text.items():
        write_pieces(part, bpe, pieces / split, (translation.source, translation.target))
    languages = ["--source-lang", translation.source, "--target-lang", translation.target, "--joined-dictionary"]
    texts = [f"--{split}pref={pieces / split}" for split in text]
    fairseq(
        "preprocess",
        [*languages, *texts, "--destdir", str(translation.binary)],
        translation.binary.with_name("preprocess.log"),
    )


def _train(translation: Translation) -> None:
    levels = translation.levels
    print("training", "in floating point" if levels == FLOAT else f"from {levels.replace('] [', '] to [')}", flush=True)
    arguments = FLAGS.arguments(translation.binary, translation.checkpoints, levels, translation.training)
    trained, command = translation.checkpoints / "trained", shlex.join(arguments)
    if trained.exists() and trained.read_text(encoding="utf-8") == command:
        return  # one that --patience ended would go on
    fairseq("train", arguments, translation.log("train"), watch=show)
    write_text(trained, command)


def _generate(translation: Translation) -> list[str]:
    print("translating the test text", flush=True)
    log = translation.log("generate")
    log.unlink(missing_ok=True)
    checkpoint = ["--path", str(translation.checkpoints / "checkpoint_best.pt")]
    search = ["--beam", str(translation.beam), "--batch-size", "128", "--remove-bpe", "sentencepiece"]
    device = ["--cpu"] if "--cpu" in translation.training else []
    fairseq("generate", [str(translation.binary), *checkpoint, *search, "--no-progress-bar", *device], log)
    return hypotheses(log)


def main(arguments: list[str] | None = None) -> int:
    top = FLAGS.parser(PROG, __doc__)
    top.add_argument("--source", default="de", metavar="LANG", help="source language (default: %(default)s)")
    top.add_argument("--target", default="en", metavar="LANG", help="target language (default: %(default)s)")
    top.add_argument("--prefix", default="", help="what the names of this corpus begin with, as in PREFIX.train.tsv.xz")
    top.add_argument(
        "--columns", default="de,en", metavar="A,B", help="languages of a .tsv's columns (default: %(default)s)"
    )
    top.add_argument("--lowercase", action="store_true", help="lower-case all text, the references too")
    top.add_argument("--beam", type=int, default=4, help="beam of the search (default: %(default)s)")
    given, training = top.parse_known_args(arguments)

    def work() -> None:
        columns = tuple(given.columns.split(","))
        translation = Translation(**{**vars(given), "columns": columns, "training": tuple(training)})
        check_flags(translation.levels, translation.training)
        print(summary(run(translation)))

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
