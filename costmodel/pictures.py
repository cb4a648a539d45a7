"""Pictures: the roofline and the sweep's Pareto front. Colours are Okabe and Ito's, told apart by the colour-blind too."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from costmodel.hardware import Hardware
from costmodel.roofline import Floor
from costmodel.sweep import Sweep

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
POINT_COLOURS = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = "osD^vP*X"
AXIS_NAMES = {
    "dram": "DRAM traffic (x fixed-point 32)",
    "arithmetic": "arithmetic (x fixed-point 32)",
    "stash": "stash (bytes)",
    "time": "time floor of a step (s)",
    "noise": "first-order rounding noise (dB)",
}


def draw_roofline(path: str, workload: str, hardware: Hardware, points: list[tuple[str, Floor]]) -> None:
    """Roofs of the hardware's datatypes and one labelled point a configuration, at its intensity and attained rate."""
    figure, axes = _figure()
    intensities = np.array([float(floor.intensity) for _, floor in points])
    rates = np.array([float(floor.flops_per_second) for _, floor in points]) / 1e12
    bandwidth = hardware.bandwidth / 1e12
    roofs = sorted({peak.flops / 1e12: peak.datatype for peak in hardware.peaks}.items())
    left = min(intensities.min(), roofs[0][0] / bandwidth) / 4
    right = max(intensities.max(), roofs[-1][0] / bandwidth) * 4
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(min(rates.min(), left * bandwidth) / 1.5, roofs[-1][0] * 2.5),
    )
    top = roofs[-1][0] / bandwidth
    axes.plot([left, top], [left * bandwidth, roofs[-1][0]], color=BLACK, linewidth=1.8)
    taken: list[Bbox] = []
    for peak, datatype in roofs:
        axes.plot([peak / bandwidth, right], [peak, peak], color=BLACK, linewidth=1.8)
        text = axes.annotate(
            f"{datatype} {peak:g} TFLOP/s", (right, peak), (-6, 3), textcoords="offset points", ha="right", va="bottom"
        )
        text.set_fontsize(9)
        taken.append(text.get_window_extent())
    _slope_label(axes, left, top, bandwidth, f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s")
    for index, (label, floor) in enumerate(points):
        colour, marker = POINT_COLOURS[index % len(POINT_COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(
            intensities[index], rates[index], marker, color=colour, markersize=9, markeredgecolor="white", zorder=5
        )
        axes.plot([intensities[index]] * 2, [axes.get_ylim()[0], rates[index]], ":", color=colour, linewidth=1)
        bound = "memory" if floor.memory_bound else "compute"
        text_label = f"{label}\n{float(floor.seconds) * 1e3:.3g} ms, {bound}-bound"
        _place(axes, text_label, (intensities[index], rates[index]), colour, taken)
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("attainable rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}")
    _save(figure, path)


def draw_sweep(path: str, title: str, found: Sweep, front: np.ndarray, x: str, y: str) -> None:
    """All configurations in grey, the front over them, a few of its points labelled."""
    figure, axes = _figure()
    xs, ys = found.columns[x], found.columns[y]
    axes.plot(xs, ys, ",", color="#BBBBBB", rasterized=True, label=f"all {len(found):,} configurations")
    rows = np.flatnonzero(front)[np.argsort(xs[front], kind="stable")]
    axes.plot(
        xs[rows], ys[rows], "o-", color=VERMILION, markersize=4, linewidth=1, label=f"Pareto front, {len(rows):,}"
    )
    taken: list[Bbox] = []
    for row in rows[np.unique(np.linspace(0, len(rows) - 1, min(7, len(rows))).round().astype(int))]:
        label = "[" + ",".join(str(int(width[row])) for width in found.precision.widths) + "]"
        axes.plot(xs[row], ys[row], "o", color=BLUE, markersize=7, zorder=5)
        _place(axes, label, (xs[row], ys[row]), BLUE, taken)
    axes.set(xlabel=AXIS_NAMES[x], ylabel=AXIS_NAMES[y], title=title)
    axes.legend(loc="upper right", frameon=False, markerscale=2)
    _save(figure, path)


def _figure() -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, 6), dpi=150)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.1, top=0.93)
    return figure, axes


def _slope_label(axes: Axes, left: float, top: float, bandwidth: float, label: str) -> None:
    (x0, y0), (x1, y1) = axes.transData.transform([(left, left * bandwidth), (top, top * bandwidth)])
    angle = float(np.degrees(np.arctan2(y1 - y0, x1 - x0)))
    at = left * (top / left) ** 0.12
    text = axes.annotate(
        label, (at, at * bandwidth), (0, 4), textcoords="offset points", rotation=angle, rotation_mode="anchor"
    )
    text.set_fontsize(9)


def _place(axes: Axes, label: str, point: tuple[float, float], colour: str, taken: list[Bbox]) -> None:
    """Write the label near the point where it overlaps nothing in `taken`, with a thin line to the point."""
    for distance in (14, 34, 56, 80, 106, 134, 164):
        for dx, dy in ((1, -0.4), (1, 0.7), (-1, 0.7), (-1, -0.4), (0.2, -1.2), (-0.2, 1.2)):
            text = axes.annotate(
                label,
                point,
                (dx * distance, dy * distance),
                textcoords="offset points",
                ha="left" if dx > 0 else "right",
                va="center",
                color=colour,
                fontsize=9,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 4},
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
                zorder=6,
            )
            box = text.get_window_extent().padded(3)
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                return
            text.remove()
    axes.annotate(label, point, color=colour, fontsize=9)  # no room anywhere: over the rest rather than lost


def _save(figure: Figure, path: str) -> None:
    figure.savefig(path)
    plt.close(figure)
