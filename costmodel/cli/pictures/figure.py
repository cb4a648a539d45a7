"""Parts that pictures by matplotlib share: the figure, and names beside points. Colours are Okabe and Ito's, told apart
by the colour-blind too."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

BLACK, GREY, VERMILION, BLUE = "#000000", "#999999", "#D55E00", "#0072B2"
COLOURS = (VERMILION, BLUE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", BLACK)
SMALL = 8.5
#: where a name may stand: how far from its point, in points, and in which direction
DISTANCES = (14, 24, 36, 50, 66, 84, 104, 126, 150, 180, 210)
DIRECTIONS = tuple((dx, dy) for dx, dy in product((1, -1, 0.5, -0.5), (0, 0.5, -0.5, 1, -1, 1.6, -1.6)) if (dx, dy))
LEADER: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
LABEL: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "zorder": 6}
LABEL["bbox"] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}

Point = tuple[float, float]


def new_figure(columns: int = 1) -> tuple[Figure, Any]:
    """A figure, and its axes: one, or a list of them side by side."""
    figure = Figure(figsize=(9 * columns, 6), dpi=150)
    FigureCanvasAgg(figure)  # which measures text
    listed = figure.subplots(1, columns, squeeze=False)[0]
    for axes in listed:
        axes.grid(True, which="major", color="#EEEEEE", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.09 / columns, right=1 - 0.03 / columns, bottom=0.1, top=0.93)
    return figure, listed[0] if columns == 1 else listed


def around(axes: Axes, point: Point, radius: float) -> Bbox:
    """The square around a point, ``radius`` pixels to each side."""
    x, y = axes.transData.transform(point)
    return Bbox.from_extents(x, y, x, y).padded(radius)


def name_points(axes: Axes, named: Iterable[tuple[str, Point, str]], taken: Sequence[Bbox] = ()) -> None:
    """Write each name near its point, in its colour, with a line to the point. A name covers neither another one nor
    what is ``taken`` (in pixels); where there is no room it is left out."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = list(taken)
    for text, point, colour in named:
        for distance, (dx, dy) in product(DISTANCES, DIRECTIONS):
            side: dict[str, Any] = {"ha": "left" if dx > 0 else "right"}
            leader = LEADER | {"color": colour, "relpos": (0 if dx > 0 else 1, 0.5)}
            away = (dx * distance, dy * distance)
            label = axes.annotate(text, point, away, **LABEL, **side, color=colour, arrowprops=leader)
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer).padded(2)  # of the words, without the leader
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in boxes):
                boxes.append(box)
                break
            label.remove()
