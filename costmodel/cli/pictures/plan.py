"""A plan's pictures: time against memory of all methods, the best one's memory over the step; a file, and a page."""

import textwrap
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from dsq.costmodel.cli.pictures.figure import BLACK, BLUE, COLOURS, GREY, SMALL, VERMILION, new_figure
from dsq.costmodel.hardware.hardware import GIGA
from dsq.costmodel.model.entries import CATEGORIES
from dsq.costmodel.planning.plan import MethodCost, Plan

#: as PyTorch's memory profiler names them; the stash is a band of its own
OF_CATEGORIES = {
    "parameters": "#009E73",
    "optimizer": "#56B4E9",
    "gradients": BLUE,
    "activations": VERMILION,
    "stash": "#CC79A7",
    "logits": "#F0E442",
    "temporary": GREY,
}
TIME, MEMORY = "time of a step (ms)", "memory of a device (GB)"
#: a method is known by its mark and color
MARKERS = ("o", "s", "^", "D")


def front(rows: tuple[MethodCost, ...]) -> list[MethodCost]:
    """Return the rows than which none is both quicker and smaller, the quickest first."""
    ahead: list[MethodCost] = []
    for row in sorted(rows, key=lambda row: (row.step.launched, row.memory.peak)):
        if not ahead or row.memory.peak < ahead[-1].memory.peak:
            ahead.append(row)
    return ahead


def place(row: MethodCost) -> tuple[float, float]:
    """Return the row's point: milliseconds, GB."""
    return row.step.launched * 1e3, row.memory.peak / GIGA


def bands(row: MethodCost) -> dict[str, list[float]]:
    """Return the GB of each category at each moment of the step, of those that there are."""
    sizes = {name: (row.memory.bytes[:, CATEGORIES.index(name)] / GIGA).tolist() for name in OF_CATEGORIES}
    return {name: band for name, band in sizes.items() if any(band)}


def moments(row: MethodCost) -> tuple[list[int], list[str]]:
    """Return where the step's parts begin, and their names."""
    return [0, len(row.memory.operations), len(row.memory.totals) - 1], ["forward", "backward", "update"]


def draw_picture(path: Path, plan: Plan) -> None:
    """Write a .png or .svg of both."""
    figure, (methods, moments_) = new_figure(columns=2, size=(6.5, 4.8))
    _draw_methods(methods, plan)
    _draw_memory(moments_, plan.best, plan.question.memory / GIGA)
    figure.savefig(path)


def _draw_methods(axes: Axes, plan: Plan) -> None:
    """Draw time and memory of each method that is shown, hollow where it does not fit; the front and the budget as
    lines."""
    line = np.transpose([place(row) for row in front(plan.shown)])
    axes.plot(*line, color=GREY, linewidth=1, zorder=1, label="no method is quicker and smaller")
    for row, (marker, color) in zip(plan.shown, cycle(product(MARKERS, COLOURS)), strict=False):
        look: dict[str, Any] = {"color": color, "fillstyle": "full" if row.fits else "none"}
        axes.plot(*place(row), marker, **look, markersize=8, label=row.method.name)
    top, budget = 1.1 * max(row.memory.peak for row in plan.shown) / GIGA, plan.question.memory / GIGA
    if budget < top:
        axes.axhline(budget, color=BLACK, linestyle="--", linewidth=1, label="what fits")
    axes.set(xlabel=TIME, ylabel=MEMORY, ylim=(0, top), title=f"{plan.workload.name}: better down and left")
    axes.set_xscale("log")
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.legend(loc="best", fontsize=SMALL, frameon=False)


def _draw_memory(axes: Axes, best: MethodCost, budget: float) -> None:
    """Draw stacked areas over the operations of forward, backward and update; the budget as a line where it is near."""
    axes.grid(visible=False)
    heights, count, top = bands(best), len(best.memory.totals), best.memory.peak / GIGA
    axes.stackplot(
        range(count), *heights.values(), labels=heights, colors=[OF_CATEGORIES[name] for name in heights], linewidth=0
    )
    axes.plot(best.memory.moment, top, "o", color=BLACK, markersize=5)
    side = ("right", -8) if best.memory.moment > count / 2 else ("left", 8)
    axes.annotate(
        f"peak {top:,.2f} GB\n{best.memory.cause}",
        (best.memory.moment, top),
        (side[1], 8),
        textcoords="offset points",
        ha=side[0],
        fontsize=SMALL,
    )
    if top < budget < 1.5 * top:
        axes.axhline(budget, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xticks(*moments(best))
    axes.set(ylabel=MEMORY, xlim=(0, count - 1), ylim=(0, 1.25 * top), title=best.method.name)
    axes.legend(loc="upper right", ncols=4, fontsize=SMALL, frameon=False)


def draw_page(path: Path, plan: Plan) -> None:
    """Write one self-contained page of both."""
    from plotly.subplots import make_subplots

    titles = (f"{plan.workload.name}: better down and left", "memory over the step")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    left, right = {"row": 1, "col": 1}, {"row": 1, "col": 2}
    figure.add_hline(plan.question.memory / GIGA, line_dash="dash", annotation_text="what fits", **left)
    line = {"mode": "lines", "line_color": GREY}
    marker = {"color": [BLUE if row.fits else VERMILION for row in plan.rows], "size": 9}
    dots = {"mode": "markers", "marker": marker, "hovertext": list(map(_told, plan.rows)), "hoverinfo": "text"}
    for rows, look in ((front(plan.rows), line), (plan.rows, dots)):
        times, peaks = zip(*map(place, rows), strict=True)
        figure.add_scatter(x=times, y=peaks, showlegend=False, **look, **left)
    owners = [""] * len(figure.data)  # of each trace, whose memory it is
    for row in plan.rows:
        for name, band in bands(row).items():
            look = {"stackgroup": row.method.name, "line": {"width": 0}, "fillcolor": OF_CATEGORIES[name]}
            figure.add_scatter(y=band, name=name, visible=row is plan.best, **look, **right)
            owners.append(row.method.name)
    buttons = [
        {"label": name, "method": "update", "args": [{"visible": [owner in ("", name) for owner in owners]}]}
        for name in (row.method.name for row in plan.rows)
    ]
    menu = {"buttons": buttons, "active": plan.rows.index(plan.best), "x": 1, "xanchor": "left", "y": 0.2}
    figure.update_xaxes(title_text=TIME, type="log", **left).update_yaxes(title_text=MEMORY, rangemode="tozero")
    ticks, words = moments(plan.best)
    figure.update_xaxes(tickvals=ticks, ticktext=words, **right)
    answer = "<br>".join(textwrap.wrap(plan.answer, 170))
    figure.update_layout(title={"text": answer, "font_size": 13}, updatemenus=[menu], margin_t=120)
    path.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")


def _told(row: MethodCost) -> str:
    """Return the fields of the row's record, a line each."""
    fields = {name: f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for name, cell in row.record().items()}
    return "<br>".join(f"{name}: {value}" for name, value in fields.items())
