"""`make demo`: a translation model trained twice on sentences of Tatoeba, in fp32 and with DSQ, in minutes.

    python -m analysis.translation.demo --out runs/demo

Two trainings side by side -> BLEU, loss, what a step keeps for its backward, a picture, the first sentences.
"""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt

from analysis import make_folder
from analysis.figures import BLUE, GREY, save
from analysis.translation.text import read_pairs
from analysis.translation.training import SPLITS, Text, Trained, prepare, train
from dsq.command import OneLineParser, as_csv, guarded, table, write_text
from dsq.precision import DEFAULT_LEVELS, levels_text

TATOEBA = Path(__file__).with_name("tatoeba")
VOCAB, BEAM = 2000, 2
#: of both trainings: small batches, so that a run of minutes has many updates
FLAGS = """--cpu --encoder-layers 2 --decoder-layers 2 --max-tokens 1024 --lr 0.003 --lr-scheduler polynomial_decay
    --warmup-updates 200 --total-num-update 1100 --max-update 1100 --max-epoch 0 --validate-interval 1000
    --validate-interval-updates 100 --seed 1"""
#: a training -> its levels, and further flags
TRAININGS = {"fp32": ("", ""), "DSQ": (levels_text(DEFAULT_LEVELS), "--dsq-stash all")}
#: a training -> what the picture calls it, and its color
_NAMES = {"fp32": ("full precision (fp32)", GREY), "DSQ": (f'DSQ, {TRAININGS["DSQ"][0]}, stash="all"', BLUE)}
_NOTE = "loss: in bits per subword, on held-out sentences; saved: activation memory of a training step"
_COLUMNS = {"run": "", "BLEU": ".1f", "loss": ".3f", "saved, MiB": ".2f", "train, s": ".0f"}


def demo(out: Path) -> None:
    """Train twice in ``out``, print what came out and draw ``out``/demo.png. Raises ValueError if ``out`` is in use."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: there already; give a new or empty directory")
    make_folder(out)
    text = Text({split: read_pairs(TATOEBA / f"{split}.tsv.xz") for split in SPLITS}, "de", "en", VOCAB)
    print(f"preparing {len(text.pairs['train']):,} pairs of sentences, {VOCAB} subwords", flush=True)
    binary = prepare(text, out / "data")
    print(
        f"training {' and '.join(TRAININGS)} side by side, some minutes; how far they are: {out}/*/train.log",
        flush=True,
    )

    def trained(name: str) -> Trained:
        levels, options = TRAININGS[name]
        return train(text, binary, out / name, levels, [*FLAGS.split(), *options.split()], BEAM)

    with ThreadPoolExecutor(len(TRAININGS)) as pool:
        trainings = dict(zip(TRAININGS, pool.map(trained, TRAININGS), strict=True))
    _show_translations(text, trainings)
    sizes = {name: kept(training.checkpoint) / 2**20 for name, training in trainings.items()}
    rows = [
        dict(
            zip(
                _COLUMNS,
                (_NAMES[name][0], training.bleu, training.valid_losses[-1][1], sizes[name], training.seconds),
                strict=True,
            )
        )
        for name, training in trainings.items()
    ]
    write_text(out / "demo.csv", as_csv(rows))
    print(f"\n{table(rows, _COLUMNS)}\n\n{_NOTE}")
    draw(trainings, sizes, out / "demo.png")
    print(f"picture: {out / 'demo.png'}; figures: {out / 'demo.csv'}")


def kept(checkpoint: Path) -> int:
    """Bytes that a training step on the first valid batch keeps for its backward, with the model of ``checkpoint``."""
    import fairseq_plugin  # noqa: F401 - its shims, before fairseq

    from fairseq import checkpoint_utils  # isort: skip

    from dsq import stash

    logging.disable(logging.INFO)  # of fairseq, as it loads
    (model,), settings, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    task.load_dataset("valid")
    batches = task.get_batch_iterator(task.dataset("valid"), max_tokens=settings.dataset.max_tokens)
    batch = next(iter(batches.next_epoch_itr(shuffle=False)))
    criterion = task.build_criterion(settings.criterion)
    model.train()
    logging.disable(logging.NOTSET)
    return stash.measure(lambda: criterion(model, batch)[0]).nbytes


def _show_translations(text: Text, results: dict[str, Trained], count: int = 3) -> None:
    print("\nthe first sentences of the test text:")
    for number, (source, target) in enumerate(text.pairs["test"][:count]):
        print(f"  {source}\n    reference  {target}")
        for name, one in results.items():
            print(f"    {name:9}  {one.translations[number]}")


def draw(results: dict[str, Trained], saved_mib: dict[str, float], path: Path) -> None:
    """Write the picture of the two trainings to ``path``: losses on the left, what a step keeps on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    for name, one in results.items():
        called, color = _NAMES[name]
        line = "--" if name == "fp32" else "-"
        shown = f"{called}, BLEU {one.bleu:.1f} at the end"
        left.plot(*zip(*one.valid_losses, strict=True), line, color=color, linewidth=2, label=shown)
    left.set_title("Loss on sentences held back (lower is better)", loc="left", fontsize=11)
    left.set_xlabel("training steps")
    left.set_ylabel("bits a subword")
    left.grid(axis="y")
    left.legend(title="translation quality: BLEU, higher is better")
    sizes = list(saved_mib.values())
    bars = right.barh(list(saved_mib), sizes, color=[_NAMES[name][1] for name in saved_mib], height=0.5)
    right.bar_label(bars, [f"{size:.1f} MiB" for size in sizes], padding=4)
    right.invert_yaxis()
    right.set_xlim(0, 1.25 * sizes[0])
    right.set_xlabel("MiB (lower is better)")
    right.set_title("Memory held between forward and backward", loc="left", fontsize=11)
    title = (
        f"One German-English translator, trained twice: with DSQ a step holds {sizes[1] / sizes[0]:.0%} of the memory"
    )
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    save(figure, path)


def main(arguments: list[str] | None = None) -> int:
    """The command; ``arguments``: default, those of the process."""
    parser = OneLineParser(prog="python -m analysis.translation.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="new directory (default: %(default)s)")
    options = parser.parse_args(arguments)
    return guarded(parser.prog, lambda: demo(options.out))


if __name__ == "__main__":
    sys.exit(main())
