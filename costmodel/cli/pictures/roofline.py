"""The roofline: roofs by datatype, a mark for each class of operations, its size its share of the step's time."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsq.costmodel.cli.answer import Record
from dsq.costmodel.cli.pictures.figure import BLACK, COLOURS, GREY, SMALL, WHITE_BOX, new_figure
from dsq.costmodel.hardware.hardware import Hardware

TERA = 1e12
#: area of a dot, in square points: of no time, and of all of it
MIN_AREA, MAX_AREA = 25, 500
MARKERS = {"attention": "o", "fc": "s", "other": "^"}  #: of operations.CLASSES
#: names that a roof's label lists
NAMES = 3
#: roofs nearer than this factor share a label
SAME_ROOF = 1.3
DATASHEET: dict[str, Any] = {"color": GREY, "linestyle": "--"}


def draw_roofline(path: Path, workload: str, hardware: Hardware, records: list[Record]) -> None:
    """Datasheet roofs dashed, reached ones solid; from each dot (a record of `dsq-cost roofline --json`) a line up to
    its roof. The key names the dots, with the share of the roof that each reaches and its share of the step's time."""
    figure, axes = new_figure()
    top, bandwidth = max(peak.flops for peak in hardware.peaks) / TERA, hardware.bandwidth / TERA
    intensities, attained = ([record[name] for record in records] for name in ("flop_per_byte", "tflops"))
    right = max(*intensities, top / bandwidth) * 200
    axes.set(xscale="log", yscale="log", xlim=(min(intensities) / 3, right), ylim=(min(attained) / 3, 4 * top))
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}", fontsize=11)
    _draw_roofs(axes, hardware)
    setups = list(dict.fromkeys(record["setup"] for record in records))
    key = []
    for record in records:
        x, y, color = record["flop_per_byte"], record["tflops"], COLOURS[setups.index(record["setup"]) % len(COLOURS)]
        axes.plot([x, x], [y, record["roof_tflops"]], ":", color=color, linewidth=1.2)
        look: dict[str, Any] = {"color": color, "marker": MARKERS[record["class"]]}
        axes.scatter(x, y, s=MIN_AREA + MAX_AREA * record["of_time"], alpha=0.75, edgecolor="white", zorder=5, **look)
        told = f"{record['of_roof']:.0%} of {record['roof']}, {record['of_time']:.0%} of time"
        key.append(Line2D([], [], linestyle="", label=f"{record['setup']}, {record['class']}: {told}", **look))
    reached = "measured" if hardware.measured else "programs reach"
    key += [Line2D([], [], color=BLACK, label=reached), Line2D([], [], **DATASHEET, label="datasheet")]
    axes.legend(handles=key, loc="best", frameon=False, fontsize=SMALL)
    figure.savefig(path)


def roofs(hardware: Hardware) -> list[tuple[float, list[str]]]:
    """The rates that are reached, in TFLOP/s, highest first, each with its datatypes; near ones together."""
    found: list[tuple[float, list[str]]] = []
    rates = {peak.datatype: peak.flops / TERA for peak in hardware.peaks} | {"vector": hardware.vector_flops / TERA}
    for name, rate in sorted(rates.items(), key=lambda named: -named[1]):
        if found and found[-1][0] < SAME_ROOF * rate:
            found[-1][1].append(name)
        else:
            found.append((rate, [name]))
    return found


def _draw_roofs(axes: Axes, hardware: Hardware) -> None:
    """Draw the bandwidth's slope and the roofs with their names."""
    (left, right), bandwidth = axes.get_xlim(), hardware.bandwidth / TERA
    slope, rates = hardware.stated_bandwidth / TERA, [peak.flops / TERA for peak in hardware.peaks]
    for stated in {peak.stated / TERA for peak in hardware.peaks if peak.stated and slope}:
        axes.plot([left, stated / slope, right], [left * slope, stated, stated], **DATASHEET, linewidth=1)
    axes.plot([left, max(rates) / bandwidth], [left * bandwidth, max(rates)], color=BLACK, linewidth=1.6)
    for rate in [*rates, hardware.vector_flops / TERA]:
        axes.plot([rate / bandwidth, right], [rate, rate], color=BLACK, linewidth=1.6)

    def name(text: str, at: tuple[float, float], away: tuple[float, float], side: str) -> None:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": SMALL, "bbox": WHITE_BOX}
        axes.annotate(text, at, away, **style)

    for rate, names in roofs(hardware):
        several = " ..." if len(names) > NAMES else ""
        name(f"{', '.join(names[:NAMES])}{several}  {rate:,.4g} TFLOP/s", (right, rate), (-4, 5), "right")
    start = max(left, axes.get_ylim()[0] / bandwidth) * 1.3
    name(f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s", (start, start * bandwidth), (8, -4), "left")
