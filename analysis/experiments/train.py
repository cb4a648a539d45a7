"""One training of a translation model, from raw text to BLEU: python -m analysis.experiments.train RUN

text -> BPE (sentencepiece) -> dsq-preprocess -> dsq-train -> dsq-generate and sacrebleu -> RUN/results.json.
RUN/run.json, which analysis.experiments.run writes, is the request; the command goes on from the last checkpoint.
"""

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from analysis.experiments.data import Data, prepare
from analysis.experiments.fairseq_run import fairseq, hypotheses, records, show
from dsq.command import OneLineParser, guarded, make_folder, write_text

PROG = "python -m analysis.experiments.train"
FLOAT = "none"  #: in place of levels: in floating point
#: flags that the command relies on
_FIXED = "--task translation --share-all-embeddings --no-epoch-checkpoints --no-progress-bar --log-format json"
#: flags that are not the user's, because the command or the data decide them
_OWN = """--task --source-lang -s --target-lang -t --no-save --checkpoint-suffix --save-dir --log-format
    --disable-validation"""
#: flags that are given unless the recipe says otherwise: a model for two CPU cores
DEFAULTS = """
    --arch transformer --encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 128 --decoder-embed-dim 128
    --encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4
    --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam
    --adam-betas (0.9,0.98) --clip-norm 1.0 --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 400
    --max-tokens 2048 --max-epoch 10 --seed 1 --num-workers 0 --log-interval 20"""


@dataclass(frozen=True)
class Training:
    """The request for a training, as run.json in its folder keeps it."""

    data: Data
    levels: str  #: of DSQConfig, or FLOAT
    flags: tuple[str, ...] = ()  #: flags of dsq-train besides; they come last, so that they override DEFAULTS
    prepared: str = ""  #: folder of the binary data, where trainings share it; "": the training's own

    @staticmethod
    def read(folder: Path) -> "Training":
        """The training of ``folder``/run.json. Raises ValueError where there is none."""
        try:
            found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{folder}: run.json cannot be read: {error.strerror}") from None
        return Training(Data(**found["data"]), found["levels"], tuple(found["flags"]), found["prepared"])

    def write(self, folder: Path, **more: Any) -> None:
        """Write ``folder``/run.json; ``more``: further entries."""
        write_json({**asdict(self), **more}, folder / "run.json")

    def arguments(self, binary: Path, save: Path) -> list[str]:
        """The arguments of dsq-train."""
        scheduled = [] if self.levels == FLOAT else ["--dsq-levels", self.levels]
        return [str(binary), "--save-dir", str(save), *_FIXED.split(), *DEFAULTS.split(), *scheduled, *self.flags]

    def check(self) -> None:
        """Raise ValueError, before anything is written, for flags that the command or dsq-train would not take."""
        taken = {word.partition("=")[0] for word in self.flags} & set(_OWN.split())
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))}: the recipe relies on its own choice here; leave out")
        from fairseq_plugin import commands  # takes seconds to import

        commands.check_training(self.arguments(Path(), Path("save")))  # any directory is data to it


def run(training: Training, out: Path) -> dict[str, Any]:
    """Do the training in ``out``, or go on with it; returns what is written to ``out``/results.json.

    Raises ValueError for what the user can mend: the data, or a flag.
    """
    data, folder = training.data, Path(training.prepared) if training.prepared else out
    found = data.read()
    make_folder(out)
    started = time.perf_counter()
    sha256 = prepare(data, folder)
    prepared = time.perf_counter()
    _train(training, folder / "binary", out)
    trained = time.perf_counter()
    scored = _translated(training, found["test"].target, folder / "binary", out)
    ended = time.perf_counter()
    history = out / "checkpoints" / "dsq_history.json"
    seconds = {"prepare": prepared - started, "train": trained - prepared, "score": ended - trained}
    results = {
        "date": date.today().isoformat(),
        "text_sha256": sha256,
        **scored,
        **({} if training.levels == FLOAT else {"history": json.loads(history.read_text(encoding="utf-8"))}),
        "valid_loss": _losses(out / "train.log"),
        "seconds": {stage: round(spent, 1) for stage, spent in {**seconds, "total": ended - started}.items()},
    }
    write_json(results, out / "results.json")
    return results


def _train(training: Training, binary: Path, out: Path) -> None:
    levels = training.levels.replace("] [", "] to [")
    print("training", "in floating point" if levels == FLOAT else f"from {levels}", flush=True)
    arguments = training.arguments(binary, out / "checkpoints")
    trained, command = out / "checkpoints" / "trained", shlex.join(arguments)
    if trained.exists() and trained.read_text(encoding="utf-8") == command:
        return  # a training that --patience ended would go on
    fairseq("train", arguments, out / "train.log", watch=show)
    write_text(trained, command)


def _translated(training: Training, references: list[str], binary: Path, out: Path) -> dict[str, Any]:
    """Return the BLEU of the test text's translations, which are written to ``out``/hypotheses.LANGUAGE."""
    from sacrebleu.metrics.bleu import BLEU  # tables are written without it

    print("translating the test text", flush=True)
    log = out / "generate.log"
    log.unlink(missing_ok=True)
    search = ["--beam", str(training.data.beam), "--batch-size", "128", "--remove-bpe", "sentencepiece"]
    device = ["--cpu"] if "--cpu" in training.flags else []
    checkpoint = ["--path", str(out / "checkpoints" / "checkpoint_best.pt"), "--no-progress-bar"]
    fairseq("generate", [str(binary), *checkpoint, *search, *device], log)
    translations = hypotheses(log)
    assert len(translations) == len(references), "dsq-generate translates every sentence of the test text"
    write_text(out / f"hypotheses.{training.data.target}", "\n".join(translations) + "\n")
    bleu = BLEU()
    score = bleu.corpus_score(translations, [references])
    return {"bleu": round(score.score, 2), "signature": str(bleu.get_signature())}


def _losses(log: Path) -> list[tuple[int, float]]:
    """Updates and validation losses of a training log. A resumed run logs some updates twice: the later line counts."""
    found = {int(one["valid_num_updates"]): float(one["valid_loss"]) for one in records(log, "valid")}
    return sorted(found.items())


def write_json(results: dict[str, Any], path: Path) -> None:
    """Write ``results`` to ``path``, whole or not at all."""
    write_text(path, json.dumps(results, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """The command; ``arguments``: default, those of the process."""
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder with run.json, for all that is written")
    folder = parser.parse_args(arguments).folder
    return guarded(PROG, lambda: run(Training.read(folder), folder))


if __name__ == "__main__":
    sys.exit(main())
