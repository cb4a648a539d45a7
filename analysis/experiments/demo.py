"""What `make demo` runs: DSQ end to end on the generated corpus, in minutes on two CPU cores.

    python -m analysis.experiments.demo --out runs/demo
    python -m analysis.experiments.demo --out runs/paper --dsq-levels "[2,2,2,16] [16,4,4,16]" --dsq-format bfp

corpus -> the recipe of analysis.experiments.translate, from [4,3,3,8] up to [8,4,4,8] at four fifths of the run (of
schedules and formats the one that saves most without losing much: docs/results.md) -> table and picture
"""

import os
import sys
from pathlib import Path

from analysis.corpus.generate import write
from analysis.experiments import translate
from analysis.experiments.training import picture
from analysis.experiments.training.flags import FLOAT, add_levels
from analysis.experiments.training.results import summary
from analysis.experiments.training.translation import Translation
from dsq.command.files import make_folder, refuse_used
from dsq.command.parser import OneLineParser, guarded
from dsq.formats import DEFAULT

PROG = "python -m analysis.experiments.demo"
SENTENCES, HELD_OUT, SEED = 20_000, 500, 1
#: Fitted to minutes on two cores: small batches, so many updates
TRAINING = """--cpu --encoder-layers 2 --decoder-layers 2 --max-tokens 1024 --lr 0.003 --lr-scheduler polynomial_decay
    --warmup-updates 200 --total-num-update 1100 --max-update 1100 --max-epoch 0 --validate-interval 1000
    --validate-interval-updates 25"""
LEVELS = "[4,3,3,8] [8,4,4,8]"
RISE = "--dsq-rise-at 0.8"  #: of two levels


def demo(out: Path, levels: str = LEVELS, format: str = DEFAULT) -> None:
    corpus = out / "corpus"
    flags = TRAINING if levels == FLOAT else f"{TRAINING} --dsq-format {format}"
    training = tuple(f"{flags} {RISE}".split() if levels.count("[") == 2 else flags.split())
    translation = Translation(data=corpus, out=out / "run", vocab=2000, beam=2, levels=levels, training=training)
    refuse_used(out)
    translate.check_flags(levels, training)
    make_folder(out)
    # a second thread gains such a small model little, and costs it much where another process wants the core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"writing a German-English corpus to {corpus}", flush=True)
    write(corpus, SENTENCES, HELD_OUT, SEED)
    results = translate.run(translation)
    _show_translations(corpus, out / "run")
    print(f"\n{summary(results)}\n\nall figures: {out / 'run' / 'results.json'}")
    if levels != FLOAT:
        picture.draw(results, out / "run.png")
        print(f"picture: {out / 'run.png'}")


def _show_translations(corpus: Path, run: Path, count: int = 3) -> None:
    print("\nthe first sentences of the test text:")
    files = (corpus / "test.de", corpus / "test.en", run / "hypotheses.en")
    lines = (path.read_text(encoding="utf-8").splitlines()[:count] for path in files)
    for german, reference, translation in zip(*lines, strict=True):
        print(f"  {german}\n    reference    {reference}\n    translation  {translation}")


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="new directory (default: %(default)s)")
    add_levels(parser, LEVELS)
    parser.add_argument("--dsq-format", dest="format", default=DEFAULT, help="number format (default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: demo(given.out, given.levels, given.format))


if __name__ == "__main__":
    sys.exit(main())
