"""The roofline: roofs by datatype; of each setup a large mark, the whole step, and small ones, its classes of
operations."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsq.costmodel.cli.answer import Record
from dsq.costmodel.cli.pictures.figure import BLACK, COLOURS, GREY, SMALL, WHITE_BOX, new_figure
from dsq.costmodel.hardware.hardware import TERA, Hardware

MARKERS = {"attention": "D", "fc": "s", "other": "^", "optimizer": "v", "total": "o"}  #: of STEP_CLASSES, and the step
CLASSES = {
    "total": "the whole step",
    "fc": "linear layers",
    "attention": "attention",
    "other": "other passes",
    "optimizer": "optimizer",
}
#: areas of the step's ring and of a class's mark, in square points
STEP_AREA, CLASS_AREA = 170, 40
#: roofs nearer than this factor share a label
SAME_ROOF = 1.4
#: least factor between the heights of two setups' labels, of a roof above a label, and of one below, with its name
LINE, UNDER, OVER = 1.5, 1.25, 1.75
DATASHEET: dict[str, Any] = {"color": GREY, "linestyle": "--"}


def draw_roofline(path: Path, workload: str, hardware: Hardware, records: list[Record]) -> None:
    """Draw datasheet roofs dashed, reached ones solid; a color a setup, whose label has the step's time. Classes that
    all setups share are black. records: those of `dsq-cost roofline --json` that have a rate."""
    figure, axes = new_figure(size=(8, 5))
    top, bandwidth = max(peak.flops for peak in hardware.peaks) / TERA, hardware.bandwidth / TERA
    intensities, attained = ([record[name] for record in records] for name in ("flop_per_byte", "tflops"))
    right = max(*intensities, top / bandwidth) * 300
    axes.set(
        xscale="log", xlabel="operational intensity (operations per DRAM byte)", xlim=(min(intensities) / 3, right)
    )
    axes.set(yscale="log", ylabel="rate (TFLOP/s)", ylim=(min(attained) / 3, 3 * top))
    axes.set_title(f"{workload}, one training step on {hardware.name}", fontsize=11)
    _draw_roofs(axes, hardware)
    setups = list(dict.fromkeys(record["setup"] for record in records))
    places = [(record["class"], record["flop_per_byte"], record["tflops"]) for record in records]
    for record, place in zip(records, places, strict=True):
        shared = len(setups) > 1 and places.count(place) == len(setups)
        color = BLACK if shared else COLOURS[setups.index(record["setup"])]
        look: dict[str, Any] = (  # steps are rings, which do not hide one another
            {"s": STEP_AREA, "facecolors": "none", "edgecolors": color, "linewidths": 2.4}
            if record["class"] == "total"
            else {"s": CLASS_AREA, "facecolors": color, "edgecolors": "white"}
        )
        axes.scatter(*place[1:], marker=MARKERS[record["class"]], zorder=5, **look)
    steps = sorted((record for record in records if record["class"] == "total"), key=lambda step: -step["tflops"])
    datasheet = (peak.datasheet_flops for peak in hardware.peaks if peak.datasheet_flops)
    lines = [*reached_rates(hardware).values(), *(rate / TERA for rate in datasheet)]
    heights = spread((record["tflops"] for record in steps), lines)
    for record, height in zip(steps, heights, strict=True):
        _label_step(axes, record, (3 * max(intensities), height), COLOURS[setups.index(record["setup"])])
    reached = "programs reach" if not hardware.efficiency.overlaps else "measured" if hardware.measured else "stated"
    key = [
        *(Line2D([], [], marker=MARKERS[name], label=text, linestyle="", color=GREY) for name, text in CLASSES.items()),
        Line2D([], [], color=BLACK, label=reached),
        Line2D([], [], **DATASHEET, label="datasheet"),
    ]
    key[0].set(fillstyle="none", markersize=9, markeredgewidth=2)
    axes.legend(handles=key, loc="lower right", frameon=False, fontsize=SMALL, ncols=2)
    figure.savefig(path)


def spread(heights: Iterable[float], lines: list[float]) -> list[float]:
    """Return the heights, highest first, moved down where two are nearer than LINE, or one covers a roof."""
    placed: list[float] = []
    for height in heights:
        height = min(height, placed[-1] / LINE) if placed else height
        while any(line / UNDER < height < line * OVER for line in lines):
            height /= 1.05
        placed.append(height)
    return placed


def _label_step(axes: Axes, record: Record, place: tuple[float, float], color: str) -> None:
    """Write a setup's name and time, with a line to its mark."""
    arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 6}
    style: dict[str, Any] = {"color": color, "fontsize": SMALL, "va": "center", "bbox": WHITE_BOX}
    mark = record["flop_per_byte"], record["tflops"]
    axes.annotate(f"{record['setup']}: {record['expected_ms']:,.4g} ms", mark, place, arrowprops=arrow, **style)


def reached_rates(hardware: Hardware) -> dict[str, float]:
    """Return the rate that each unit reaches, in TFLOP/s."""
    return {peak.datatype: peak.flops / TERA for peak in hardware.peaks} | {"vector": hardware.vector_flops / TERA}


def roofs(hardware: Hardware) -> list[tuple[float, str]]:
    """Return the rates that are reached, in TFLOP/s, highest first, each with its label; near ones together."""
    placed: list[tuple[float, str]] = []
    for name, rate in sorted(reached_rates(hardware).items(), key=lambda named: -named[1]):
        label = f"{name} {rate:,.4g}"
        if placed and placed[-1][0] < SAME_ROOF * rate:
            placed[-1] = placed[-1][0], f"{placed[-1][1]}, {label}"
        else:
            placed.append((rate, label))
    return placed


def _draw_roofs(axes: Axes, hardware: Hardware) -> None:
    """Draw the bandwidth's slope and the roofs with their names."""
    (low, high), bandwidth = axes.get_xlim(), hardware.bandwidth / TERA
    slope, rates = hardware.datasheet_bandwidth / TERA, [peak.flops / TERA for peak in hardware.peaks]
    for rate in {peak.datasheet_flops / TERA for peak in hardware.peaks if peak.datasheet_flops and slope}:
        axes.plot([low, rate / slope, high], [low * slope, rate, rate], **DATASHEET, linewidth=0.8)
    axes.plot([low, max(rates) / bandwidth], [low * bandwidth, max(rates)], color=BLACK, linewidth=1.4)
    for rate in [*rates, hardware.vector_flops / TERA]:
        axes.plot([rate / bandwidth, high], [rate, rate], color=BLACK, linewidth=1.4)
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "bbox": WHITE_BOX}
    for rate, label in roofs(hardware):
        axes.annotate(label, (high, rate), (-4, 5), ha="right", **style)
    start = max(low, axes.get_ylim()[0] / bandwidth) * 1.3
    axes.annotate(f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s", (start, start * bandwidth), (8, -4), **style)
