"""`make demo`: a translation model trained twice on sentences of Tatoeba, in fp32 and with DSQ, in minutes.

    python -m analysis.experiments.demo --out runs/demo

recipes/demo.toml -> two trainings side by side -> BLEU, loss, what a step keeps for its backward, and a picture
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from analysis.experiments import run
from analysis.experiments.recipe import RECIPES, load_experiment, plan
from analysis.figures import BLUE, GREY, look, save
from dsq.command import OneLineParser, as_csv, guarded, table, write_text

PROG = "python -m analysis.experiments.demo"
RECIPE = RECIPES / "demo.toml"
TEXT = Path(__file__).with_name("tatoeba")
#: label of a run -> what the picture calls it, and its colour
_NAMES = {"fp32": ("full precision (fp32)", GREY), "DSQ": ("DSQ, [8,4,4,8], whole stash", BLUE)}
_NOTE = "loss: in bits a subword, on sentences held back; kept: what a training step keeps for its backward"
_COLUMNS = {"run": "", "BLEU": ".1f", "loss": ".3f", "kept, MiB": ".2f", "train, s": ".0f"}


def demo(out: Path) -> None:
    """Train twice in ``out``, print what came out and draw ``out``/demo.png. Raises ValueError if ``out`` is in use."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: there already; give a new or empty directory")
    run.run_recipe(RECIPE, out, data=TEXT, jobs=2)
    folders = {one.label: out / one.name for one in plan(load_experiment(RECIPE))}
    found = {label: _results(folder) for label, folder in folders.items()}
    _show_translations(folders)
    rows = [_figures(label, results) for label, results in found.items()]
    write_text(out / "demo.csv", as_csv(rows))
    print(f"\n{table(rows, _COLUMNS)}\n\n{_NOTE}")
    draw(found, out / "demo.png")
    print(f"picture: {out / 'demo.png'}; figures: {out / 'demo.csv'}, {out}/*/results.json")


def _figures(label: str, results: dict[str, Any]) -> dict[str, Any]:
    (_, loss), seconds = results["valid_loss"][-1], results["seconds"]["train"]
    values = (_NAMES[label][0], results["bleu"], loss, results["kept_mib"], seconds)
    return dict(zip(_COLUMNS, values, strict=True))


def _results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {**results, "kept_mib": kept(folder / "checkpoints" / "checkpoint_best.pt") / 2**20}


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


def _show_translations(folders: dict[str, Path], count: int = 3) -> None:
    from analysis.experiments.text import read_parallel

    test = read_parallel(TEXT, "de", "en")["test"]
    said = {
        label: (folder / "hypotheses.en").read_text(encoding="utf-8").splitlines() for label, folder in folders.items()
    }
    print("\nthe first sentences of the test text:")
    for number in range(count):
        print(f"  {test.source[number]}\n    reference  {test.target[number]}")
        for label, lines in said.items():
            print(f"    {label:9}  {lines[number]}")


@look()
def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the picture of the two runs' results to ``path``: losses on the left, what a step keeps on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    for label, results in found.items():
        name, colour = _NAMES[label]
        line = "--" if label == "fp32" else "-"
        shown = f"{name}, BLEU {results['bleu']:.1f} at the end"
        left.plot(*zip(*results["valid_loss"], strict=True), line, color=colour, linewidth=2, label=shown)
    left.set_title("Loss on sentences held back (lower is better)", loc="left", fontsize=11)
    left.set_xlabel("training steps")
    left.set_ylabel("bits a subword")
    left.grid(axis="y")
    left.legend(title="translation quality: BLEU, higher is better")
    names = ["fp32", "DSQ"]
    sizes = [found[name]["kept_mib"] for name in names]
    bars = right.barh(names, sizes, color=[_NAMES[name][1] for name in names], height=0.5)
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
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="new directory (default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: demo(given.out))


if __name__ == "__main__":
    sys.exit(main())
