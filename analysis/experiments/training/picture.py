"""The picture of a run: losses and precision level over updates."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from analysis.figures import BLUE, GREY, ORANGE, look, save


@look()
def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of a DSQ run's results to path (.png or .svg)."""
    levels = results["history"]["levels"]
    names = [str(level["precision"]).replace(" ", "") for level in levels]
    ends = [sum(level["updates"] for level in levels[: n + 1]) for n in range(len(levels))]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.2), height_ratios=(4, 1))
    top.plot(*zip(*results["train_loss"], strict=True), color=GREY, linewidth=1, label="training")
    top.plot(*zip(*results["valid_loss"], strict=True), color=BLUE, marker="o", markersize=4, label="validation")
    top.set_ylabel("loss (bits a subword, smoothed)")
    top.legend()
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
            x, y, ha, va = (start, 4, "left", "baseline") if row == 1 else (end, -4, "right", "top")
            bottom.annotate(share, (x, row), (0, y), textcoords="offset points", ha=ha, va=va)
    for axes in (top, bottom):
        axes.grid(axis="y")
    figure.suptitle(f"BLEU {results['bleu']:.1f} after {ends[-1]:,} updates", x=0.02, ha="left")
    save(figure, path)
