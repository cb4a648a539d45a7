"""The picture of a run: losses and precision level over updates."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from analysis.colours import BLUE, GREY, ORANGE
from dsq.command.files import write_whole


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a DSQ run's results to path (.png or .svg)."""
    levels = results["history"]["levels"]
    names = [str(level["precision"]).replace(" ", "") for level in levels]
    ends = [sum(level["updates"] for level in levels[: n + 1]) for n in range(len(levels))]
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.2), height_ratios=(4, 1), layout="constrained"
    )
    top.plot(*zip(*results["train_loss"], strict=True), color=GREY, linewidth=1, label="training")
    top.plot(*zip(*results["valid_loss"], strict=True), color=BLUE, marker="o", markersize=4, label="validation")
    top.set_ylabel("loss (bits a subword, smoothed)")
    top.legend(frameon=False)
    starts = [0, *ends[:-1]]
    bottom.stairs(range(1, len(levels) + 1), [0, *ends], color=ORANGE, linewidth=2.5, baseline=None, zorder=3)
    bottom.set_yticks(range(1, len(levels) + 1), names)
    bottom.set_ylim(0.5, len(levels) + 0.5)
    bottom.set_ylabel("precision")
    bottom.set_xlabel("updates")
    for name, start, end in zip(names[1:], starts[1:], ends[1:], strict=True):
        if end > start:
            for axes in (top, bottom):
                axes.axvline(start, color=ORANGE, linestyle="--", linewidth=1)
            top.annotate(f" to {name}", (start, 1), xycoords=("data", "axes fraction"), va="top", color=ORANGE)
    for row, (level, start, end) in enumerate(zip(levels, starts, ends, strict=True), start=1):
        if level.get("stash_bytes_fp32") and end > start:
            share = f"stash {level['stash_bytes'] / level['stash_bytes_fp32']:.1%} of fp32"
            if row == 1:
                bottom.annotate(share, (start, row), (0, 4), textcoords="offset points")
            else:
                bottom.annotate(share, (end, row), (0, -4), textcoords="offset points", ha="right", va="top")
    for axes in (top, bottom):
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4)
    figure.suptitle(f"BLEU {results['bleu']:.1f} after {ends[-1]:,} updates", x=0.02, ha="left")
    write_whole(path, lambda file: figure.savefig(file, dpi=150))
    plt.close(figure)
