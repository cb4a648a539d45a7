"""Cost against score: a marker a schedule, its format by colour and shape, and the front that none lies above.

A schedule that lost much stands hollow at the lower edge, its score beside it: so that small differences can be seen.
"""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from analysis.experiments.ledger import Configuration
from analysis.figures import BLUE, GREEN, GREY, ORANGE, look, save
from costmodel.cli.pictures.figure import around, name_points

_LOOKS = {"bfp": (BLUE, "o"), "sbfp": (ORANGE, "s"), "snvint": (GREEN, "^"), "fixed": (GREY, "D")}
_OTHER = ("black", "X")
#: share of fp32's score below which a schedule stands at the lower edge
_LOWEST = 0.88
_COSTS = {"arithmetic": "arithmetic, fixed-point 32 = 1", "dram": "DRAM traffic, fixed-point 32 = 1"}
Point = tuple[float, float]  #: cost, score


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats, rising in cost and score."""
    found: list[Point] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or score > found[-1][1]:
            found.append((cost, score))
    return found


@look()
def draw(group: Sequence[Configuration], path: Path) -> None:
    """Write the picture of a recipe's configurations to path (.png or .svg)."""
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(12, 6))
    points = [_panel(axes, group, cost) for axes, cost in zip(panels, _COSTS, strict=True)]
    panels[0].set_ylabel(f"{group[0].first['measure']}, mean of seeds; bars: smallest to largest; hollow: lower")
    handles, labels = panels[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    legend = panels[0].legend(named.values(), named.keys(), loc="lower right")
    figure.draw_without_rendering()  # now everything has its place
    for axes, schedules in zip(panels, points, strict=True):
        _label(axes, schedules, [legend.get_window_extent()])
    save(figure, path)


def _panel(axes: Axes, group: Sequence[Configuration], cost: str) -> dict[str, list[Point]]:
    """Draw all but the names; gives the points of each schedule, a format each."""
    points: dict[str, list[Point]] = {}
    lowest = _LOWEST * next((one.mean("score") for one in group if one.is_float), 0)
    for one in group:
        x, y, scores = one.mean(cost), one.mean("score"), one.values("score")
        if math.isnan(y):
            continue
        if math.isnan(x):
            axes.axhline(y, color=GREY, linestyle="--", linewidth=1, label="fp32")
            continue
        colour, marker = _LOOKS.get(one.format, _OTHER)
        if y < lowest:
            axes.plot(x, lowest, color=colour, marker=marker, markersize=7, fillstyle="none", clip_on=False)
            points.setdefault(f"{one.schedule}: {y:.1f}", []).append((x, lowest))
            continue
        bars = [[max(y - min(scores), 0)], [max(max(scores) - y, 0)]]  # a mean of equal numbers is rounded
        axes.errorbar(x, y, bars, color=colour, marker=marker, markersize=7, linewidth=1, label=one.format)
        points.setdefault(one.schedule, []).append((x, y))
    best = front([point for several in points.values() for point in several if point[1] > lowest])
    axes.plot(*zip(*best, strict=True), color=GREY, linewidth=1, zorder=0, drawstyle="steps-post", label="front")
    axes.set_xlabel(_COSTS[cost])
    axes.set_xscale("log")
    for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        ticks(FuncFormatter(_tick))
    axes.margins(x=0.15, y=0.2)
    if any(one.mean("score") < lowest for one in group):
        axes.set_ylim(bottom=lowest)
    axes.grid()
    return points


def _tick(value: float, _: int) -> str:
    """Names those of a decade that have room."""
    text = f"{value:.1g}"
    return text if text[-1] in "12346" else ""


def _label(axes: Axes, points: dict[str, list[Point]], taken: list[Bbox]) -> None:
    """Name each schedule once, at its best point: formats of one width cost the same."""
    dots = [around(axes, point, 6) for point in chain.from_iterable(points.values())]
    best = ((name, max(several, key=lambda point: point[1]), GREY) for name, several in points.items())
    name_points(axes, best, [*taken, *dots])
