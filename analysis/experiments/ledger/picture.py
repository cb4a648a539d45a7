"""Cost against score: a marker a schedule, its format by colour and shape, and the front that none lies above."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.experiments.ledger.configurations import Configuration
from analysis.figures import BLUE, GREEN, GREY, ORANGE, look, save

_LOOKS = {"bfp": (BLUE, "o"), "sbfp": (ORANGE, "s"), "snvint": (GREEN, "^"), "fixed": (GREY, "D")}
_OTHER = ("black", "X")
_COSTS = {"arithmetic": "arithmetic, fixed-point 32 = 1", "dram": "DRAM traffic, fixed-point 32 = 1"}
Point = tuple[float, float]  #: cost, score


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats, rising in cost and score."""
    found: list[Point] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or score > found[-1][1]:
            found.append((cost, score))
    return found


@look()
def draw(group: Sequence[Configuration], path: Path) -> None:
    """Write the picture of a recipe's configurations to path (.png or .svg)."""
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(12, 6))
    for axes, cost in zip(panels, _COSTS, strict=True):
        _panel(axes, group, cost)
    panels[0].set_ylabel(f"{group[0].first['measure']}, mean of seeds; bars: smallest to largest")
    handles, labels = panels[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    panels[0].legend(named.values(), named.keys(), loc="lower right")
    save(figure, path)


def _panel(axes: Axes, group: Sequence[Configuration], cost: str) -> None:
    points: dict[str, list[Point]] = {}
    for one in group:
        x, y, scores = one.mean(cost), one.mean("score"), one.values("score")
        if math.isnan(y):
            continue
        if math.isnan(x):
            axes.axhline(y, color=GREY, linestyle="--", linewidth=1, label="fp32")
            continue
        colour, marker = _LOOKS.get(one.format, _OTHER)
        bars = [[y - min(scores)], [max(scores) - y]]
        axes.errorbar(x, y, bars, color=colour, marker=marker, markersize=7, linewidth=1, label=one.format)
        points.setdefault(one.schedule, []).append((x, y))
    best = front([point for several in points.values() for point in several])
    axes.plot(*zip(*best, strict=True), color=GREY, linewidth=1, zorder=0, drawstyle="steps-post", label="front")
    for schedule, several in points.items():  # formats of one width cost the same: one text for all of them
        top = max(several, key=lambda point: point[1])
        axes.annotate(schedule, top, (4, 7), textcoords="offset points", rotation=45, fontsize=7)
    axes.set_xlabel(_COSTS[cost])
    axes.set_xscale("log")
    for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        ticks(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.margins(x=0.15, y=0.12)
    axes.grid()
