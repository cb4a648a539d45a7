"""What pictures share: the figure, and labels whose leaders cross nothing. Colours are Okabe and Ito's, told apart by
the colour-blind too."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path as File
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

BLACK, GREY, VERMILION, BLUE = "#000000", "#999999", "#D55E00", "#0072B2"
COLOURS = (VERMILION, BLUE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", BLACK)
SMALL = 8.5
#: where a label may stand: how far from its point, in points, and in which direction
DISTANCES = (14, 24, 36, 50, 66, 84, 104, 126, 150, 180, 210)
DIRECTIONS = tuple((dx, dy) for dx, dy in product((1, -1, 0.5, -0.5), (0, 0.5, -0.5, 1, -1, 1.6, -1.6)) if (dx, dy))
#: pieces of a leader that are looked at one by one: a line that it follows counts as crossed
STEPS = 12
LEADER: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 0}
LABEL: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "zorder": 6}
LABEL["bbox"] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}

Point = tuple[float, float]


def new_figure() -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, 6), dpi=150)
    axes.grid(True, which="major", color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.1, top=0.93)
    return figure, axes


def save(figure: Figure, path: File) -> None:
    figure.savefig(path)
    plt.close(figure)


@dataclass
class Labels:
    """Places labels beside points. Neither a label nor its leader touches what is already there."""

    axes: Axes
    boxes: list[Bbox] = field(default_factory=list)  #: pixels that are taken
    lines: list[Path] = field(default_factory=list)  #: lines in pixels that nothing may cross

    def avoid_point(self, point: Point, radius: float) -> None:
        """`radius` in pixels."""
        x, y = self.pixels(point)
        self.boxes.append(Bbox.from_extents(x, y, x, y).padded(radius))

    def avoid_line(self, points: Iterable[Point]) -> None:
        self.lines.append(Path([self.pixels(point) for point in points]))

    def pixels(self, point: Point) -> Point:
        x, y = self.axes.transData.transform(point)
        return float(x), float(y)

    def place(self, text: str, point: Point, colour: str, radius: float = 5) -> None:
        """Write the text near the point, whose dot has the radius in points. Where there is no room it is left out.

        The words cover a line only where they find no place beside it; their leader never crosses one.
        """
        for covering, distance, (dx, dy) in product((False, True), DISTANCES, DIRECTIONS):
            away = (dx * (distance + radius), dy * (distance + radius))
            side: dict[str, Any] = {"ha": "left", "relpos": (0, 0.5)} if dx > 0 else {"ha": "right", "relpos": (1, 0.5)}
            leader = LEADER | {"color": colour, "shrinkB": radius, "relpos": side.pop("relpos")}
            label = self.axes.annotate(text, point, away, **LABEL, **side, color=colour, arrowprops=leader)
            if self._is_free(label, point, away, radius, covering):
                return
            label.remove()

    def _is_free(self, label: Annotation, point: Point, away: Point, radius: float, covering: bool) -> bool:
        """Whether the label and its leader touch nothing; then they are taken too."""
        canvas = self.axes.figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        label.update_positions(canvas.get_renderer())
        box = Text.get_window_extent(label, canvas.get_renderer()).padded(2)  # of the words, without the leader
        if not (self.axes.bbox.contains(box.x0, box.y0) and self.axes.bbox.contains(box.x1, box.y1)):
            return False
        leader = self._leader(point, away, radius)
        touched = any(box.overlaps(other) or leader.intersects_bbox(other, filled=True) for other in self.boxes)
        points = np.asarray(leader.interpolated(STEPS).vertices)
        near = [Bbox.from_extents(x, y, x, y).padded(2) for x, y in points]
        taken = near if covering else [*near, box]
        crossed = any(
            leader.intersects_path(line, filled=False)
            or any(line.intersects_bbox(place, filled=False) for place in taken)
            for line in self.lines
        )
        if not (touched or crossed):
            self.boxes.append(box)
            self.lines.append(leader)
        return not (touched or crossed)

    def _leader(self, point: Point, away: Point, radius: float) -> Path:
        """From the edge of the dot, a little off it, to the label, in pixels."""
        (x, y), scale, length = self.pixels(point), self.axes.figure.dpi / 72, math.hypot(*away)
        return Path(
            [
                (x + scale * dx * part, y + scale * dy * part)
                for dx, dy in [away]
                for part in (_off(radius, length), 0.98)
            ]
        )


def _off(radius: float, length: float) -> float:
    return min((radius + 3) / length, 0.9)
