"""The picture of analysis.stash.compare: bytes held, and where measured step time and gradient error of each setup."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures import BLUE, GREEN, GREY, ORANGE, look, save


@look()
def draw(results: pd.DataFrame, path: Path) -> None:
    """Write the picture: bars of the bytes held with a tick at the least possible, then dots of error and time."""
    groups = [(str(name), rows.iloc[::-1]) for name, rows in results.groupby("model", sort=False)]
    heights = [len(rows) + 2 for _, rows in groups]
    timed = bool(results["time"].notna().any())
    figure, grid = plt.subplots(
        len(groups),
        2 + timed,
        figsize=(9 + 3 * timed, 0.27 * sum(heights) + 0.8),
        height_ratios=heights,
        width_ratios=(2.2, 1, 1)[: 2 + timed],
        sharey="row",
        squeeze=False,
    )
    for (name, rows), panels in zip(groups, grid, strict=True):
        _stash(panels[0], rows, name)
        if timed:
            _dots(panels[-1], rows, "time", "step time over plain", BLUE, "o")
            panels[-1].axvline(1, color=GREY, linewidth=0.8)
        _dots(panels[1], rows, "error", "relative gradient error", GREEN, "D")
        panels[1].set_xscale("symlog", linthresh=1e-3)
        panels[1].set_xlim(-1e-4, None)
        for axes in panels:
            axes.grid(axis="x")
    save(figure, path)


def _stash(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    places = range(len(rows))
    axes.barh(places, rows["held, MiB"], color=BLUE, height=0.62, label="held at the end of the forward")
    least = rows["least, MiB"]
    axes.plot(least, places, linestyle="", marker="|", markersize=11, markeredgewidth=2, color=ORANGE, label="least")
    ends = rows[["held, MiB", "least, MiB"]].max(axis=1)
    for place, value, end in zip(places, rows["held, MiB"], ends, strict=True):
        axes.annotate(f"{value:.1f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, rows["setup"], fontsize=9)
    axes.set_xlabel("held, MiB")
    axes.set_title(name, loc="left", fontweight="bold")
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)


def _dots(axes: Axes, rows: pd.DataFrame, column: str, label: str, color: str, marker: str) -> None:
    axes.plot(rows[column], range(len(rows)), linestyle="", marker=marker, color=color, markersize=5)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
