"""Pictures: the roofline and the sweep's Pareto front. Colours are Okabe and Ito's, told apart by the colour-blind
too."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from costmodel.hardware.hardware import Hardware
from costmodel.model.quantisation import PrecisionGrid
from costmodel.model.roofline import Floor
from costmodel.model.sweep import Column, Mask

BLACK, VERMILION, BLUE = "#000000", "#D55E00", "#0072B2"
POINT_COLOURS = (VERMILION, BLUE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", BLACK)
MARKERS = "osD^vP*X"
TERA = 1e12
AWAY: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9, "zorder": 6}
LINE = {"arrowstyle": "-", "linewidth": 0.7, "shrinkB": 4}
AXIS_NAMES = {
    "dram": "DRAM traffic (x {unit})",
    "arithmetic": "arithmetic (x {unit})",
    "stash": "stash (bytes)",
    "time": "time floor of a step (s)",
    "noise": "first-order rounding noise (dB)",
}


def draw_roofline(path: Path, workload: str, hardware: Hardware, points: list[tuple[str, Floor]]) -> None:
    """Roofs of the hardware's datatypes and one labelled point a configuration, at its intensity and attained rate."""
    figure, axes = _figure()
    xs = [float(floor.intensity) for _, floor in points]
    ys = [float(floor.flops_per_second) / TERA for _, floor in points]
    bandwidth = hardware.bandwidth / TERA
    roofs = sorted({peak.flops / TERA: peak.datatype for peak in hardware.peaks}.items())
    highest, lowest = roofs[-1][0], roofs[0][0]
    left = min(*xs, lowest / bandwidth) / 4
    right = max(*xs, highest / bandwidth) * 6
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(*ys, lowest) / 4, highest * 2.5))
    axes.plot([left, highest / bandwidth], [left * bandwidth, highest], color=BLACK, linewidth=1.8)
    taken: list[Bbox] = []
    for peak, datatype in roofs:
        axes.plot([peak / bandwidth, right], [peak, peak], color=BLACK, linewidth=1.8)
        label = f"{datatype}  {peak:g} TFLOP/s"
        text = axes.annotate(label, (right, peak), (-6, 3), textcoords="offset points", ha="right", fontsize=9)
        taken += [text.get_window_extent(), _box(axes, (peak / bandwidth, peak), (right, peak))]
    slope = np.geomspace(left, highest / bandwidth, 200)
    taken += [_box(axes, (x, x * bandwidth), (x, x * bandwidth)) for x in slope]
    _slope_label(axes, highest / bandwidth, bandwidth, f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s")
    taken += [_box(axes, (x, y), (x, y), margin=8) for x, y in zip(xs, ys, strict=True)]
    for index, (label, floor) in enumerate(points):
        colour, marker = POINT_COLOURS[index % len(POINT_COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(xs[index], ys[index], marker, color=colour, markersize=9, markeredgecolor="white", zorder=5)
        bound = "memory" if floor.memory_bound else "compute"
        milliseconds = float(floor.seconds) * 1e3
        time = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
        _place(axes, f"{label}\n{time} ms, {bound}-bound", (xs[index], ys[index]), colour, taken)
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("attainable rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}")
    _save(figure, path)


def draw_sweep(
    path: Path, title: str, precision: PrecisionGrid, columns: dict[str, Column], front: Mask, x: str, y: str, unit: str
) -> None:
    """All configurations in grey, the front over them, a few of its points labelled."""
    figure, axes = _figure()
    xs, ys = columns[x], columns[y]
    label = f"all {len(precision):,} configurations"
    axes.plot(xs, ys, ".", color="#999999", markersize=1.5, rasterized=True, label=label)
    rows = np.flatnonzero(front)[np.argsort(xs[front], kind="stable")]
    label = f"Pareto front, {len(rows):,} configurations"
    axes.plot(xs[rows], ys[rows], "o", color=VERMILION, markersize=4, label=label)
    axes.margins(0.08)
    axes.autoscale_view()
    axes.set(xlabel=AXIS_NAMES[x].format(unit=unit), ylabel=AXIS_NAMES[y].format(unit=unit), title=title)
    legend = axes.legend(loc="upper right", frameon=False, markerscale=2)
    taken = [_box(axes, (xs[row], ys[row]), (xs[row], ys[row])) for row in rows[:: max(1, len(rows) // 200)]]
    taken.append(legend.get_window_extent())
    for row in rows[np.unique(np.linspace(0, len(rows) - 1, min(7, len(rows))).round().astype(int))]:
        axes.plot(xs[row], ys[row], "o", color=BLUE, markersize=7, zorder=5)
        _place(axes, str(precision[row]), (xs[row], ys[row]), BLUE, taken)
    _save(figure, path)


def _figure() -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, 6), dpi=150)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.1, top=0.93)
    return figure, axes


def _box(axes: Axes, start: tuple[float, float], end: tuple[float, float], margin: float = 3) -> Bbox:
    """The pixels around a horizontal line or a point."""
    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    return Bbox.from_extents(x0, y0, x1, y1).padded(margin)


def _slope_label(axes: Axes, ridge: float, bandwidth: float, label: str) -> None:
    """Along the bandwidth line, low on it, clear of the roofs."""
    bottom = max(axes.get_xlim()[0], axes.get_ylim()[0] / bandwidth)
    (x0, y0), (x1, y1) = axes.transData.transform([(bottom, bottom * bandwidth), (ridge, ridge * bandwidth)])
    angle = float(np.degrees(np.arctan2(y1 - y0, x1 - x0)))
    at = bottom * (ridge / bottom) ** 0.03
    text = axes.annotate(label, (at, at * bandwidth), (-3, 5), textcoords="offset points", rotation=angle, fontsize=9)
    text.set_rotation_mode("anchor")


def _place(axes: Axes, label: str, point: tuple[float, float], colour: str, taken: list[Bbox]) -> None:
    """Write the label near the point where it overlaps nothing in `taken`, with a thin line to the point."""
    assert isinstance(axes.figure.canvas, FigureCanvasAgg)
    renderer = axes.figure.canvas.get_renderer()
    for distance in (14, 30, 48, 68, 90, 114, 140, 170):
        for dx, dy in ((-1, -0.5), (-1, 0.6), (1, -0.5), (1, 0.6), (-0.3, -1.2), (0.3, -1.2), (-0.3, 1.2), (0.3, 1.2)):
            side, at = "left" if dx > 0 else "right", (dx * distance, dy * distance)
            text = axes.annotate(label, point, at, **AWAY, ha=side, arrowprops=LINE | {"color": colour})
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer).padded(2)  # of the words: Annotation's own includes the line
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                return
            text.remove()
    axes.annotate(label, point, fontsize=9)  # no room anywhere: over the rest rather than lost


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path)
    plt.close(figure)
