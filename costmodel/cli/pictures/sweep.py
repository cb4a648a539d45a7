"""The sweep: configurations where no bit is free, and the paper's setups."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from costmodel.cli.pictures.figure import BLACK, BLUE, VERMILION, Labels, new_figure, save
from costmodel.model.quantisation import PrecisionGrid
from costmodel.model.sweep import Column, Mask
from dsq.precision import Precision

AXIS_NAMES = {
    "dram": "DRAM traffic (x {unit})",
    "arithmetic": "arithmetic (x {unit})",
    "stash": "stash (bytes)",
    "time": "time of a step (s)",
}
#: of a front, points with a label
NAMED = 6


def draw_sweep(
    path: Path,
    title: str,
    precision: PrecisionGrid,
    columns: dict[str, Column],
    front: Mask,
    axes_names: tuple[str, str],
    unit: str,
    marked: Sequence[Precision],
) -> None:
    """The front, which covers the configurations that cost as much with fewer bits, some of its points labelled, and
    those of `marked`."""
    figure, axes = new_figure()
    x, y = axes_names
    xs, ys = columns[x], columns[y]
    rows = np.flatnonzero(front)[np.argsort(xs[front], kind="stable")]
    label = f"no bit is free: {len(rows):,} of {len(precision):,} configurations"
    axes.plot(xs[rows], ys[rows], "o", color=VERMILION, markersize=4, label=label)
    paper = [row for setup in marked if (row := _row(precision, setup)) is not None]
    if paper:
        label = "setups of the paper" if len(paper) > 1 else "a setup of the paper"
        style = {"color": BLUE, "markersize": 9, "markeredgecolor": BLACK}
        axes.plot(xs[paper], ys[paper], "*", **style, linestyle="", label=label)  # type: ignore[arg-type]
    axes.margins(0.12)
    axes.autoscale_view()
    axes.set_xlabel(AXIS_NAMES[x].format(unit=unit))
    axes.set_ylabel(AXIS_NAMES[y].format(unit=unit))
    axes.set_title(title, fontsize=11)
    legend = axes.legend(loc="best", frameon=False, markerscale=1.5)
    figure.canvas.draw()
    labels = Labels(axes, [legend.get_window_extent()])
    named = rows[np.unique(np.linspace(0, len(rows) - 1, min(NAMED, len(rows))).round().astype(int))]
    for row in {*rows[:: max(1, len(rows) // 200)].tolist(), *paper}:
        labels.avoid_point((xs[row], ys[row]), 4)
    for row in paper:
        labels.place(str(precision[row]), (xs[row], ys[row]), BLUE)
    for row in named:
        if row not in paper:
            labels.place(str(precision[row]), (xs[row], ys[row]), VERMILION)
    save(figure, path)


def _row(precision: PrecisionGrid, setup: Precision) -> int | None:
    """Where in the grid the setup is."""
    same = np.all([mine == wanted for mine, wanted in zip(precision, setup, strict=True)], axis=0)
    return int(np.argmax(same)) if same.any() else None
