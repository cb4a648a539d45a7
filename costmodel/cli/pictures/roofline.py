"""The roofline: roofs by datatype, a dot for each class of operations, its size its share of the step's time."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dsq.costmodel.cli.answer import Record
from dsq.costmodel.cli.pictures.figure import BLACK, COLOURS, GREY, LABEL, SMALL, new_figure, save
from dsq.costmodel.hardware.hardware import Hardware
from dsq.costmodel.model.operations import CLASSES

TERA = 1e12
#: area of a dot, in square points: of no time, and of all of it
LEAST_AREA, MOST_AREA = 25, 500
MARKERS = dict(zip(CLASSES, "so^", strict=True))
#: names that a roof's label lists
NAMES = 3
#: roofs nearer than this factor share a label
SAME_ROOF = 1.3
DATASHEET: dict[str, Any] = {"color": GREY, "linestyle": "--"}


def draw_roofline(path: Path, workload: str, hardware: Hardware, records: list[Record]) -> None:
    """Datasheet roofs dashed, reached ones solid; from each dot (a record of `dsq-cost roofline --json`) a line up to
    its roof and the share it reaches."""
    figure, axes = new_figure()
    setups = list(dict.fromkeys(record["setup"] for record in records))
    colours = {setup: COLOURS[index % len(COLOURS)] for index, setup in enumerate(setups)}
    top, bandwidth = max(peak.flops for peak in hardware.peaks) / TERA, hardware.bandwidth / TERA
    intensities, attained = ([record[name] for record in records] for name in ("flop_per_byte", "tflops"))
    right = max(*intensities, top / bandwidth) * 200
    axes.set(xscale="log", yscale="log", xlim=(min(intensities) / 3, right), ylim=(min(attained) / 3, 4 * top))
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}", fontsize=11)
    reached = "measured" if hardware.measured else "programs reach"
    handles = [Line2D([], [], marker="o", linestyle="", color=colours[setup], label=setup) for setup in setups]
    classes = {record["class"]: MARKERS[record["class"]] for record in records}
    handles += [Line2D([], [], marker=it, linestyle="", color=GREY, label=name) for name, it in classes.items()]
    handles += [Line2D([], [], color=BLACK, label=reached), Line2D([], [], **DATASHEET, label="datasheet")]
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=SMALL)
    _draw_roofs(axes, hardware)
    for record, x, y in zip(records, intensities, attained, strict=True):
        look = {"marker": classes[record["class"]], "color": colours[record["setup"]], "alpha": 0.75, "zorder": 5}
        axes.plot([x, x], [y, record["roof_tflops"]], ":", color=look["color"], linewidth=1.2)
        axes.scatter(x, y, s=LEAST_AREA + MOST_AREA * record["of_time"], edgecolor="white", linewidth=0.8, **look)
    save(figure, path)


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
        style: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": SMALL, "bbox": LABEL["bbox"]}
        axes.annotate(text, at, away, **style)

    for rate, names in roofs(hardware):
        several = " ..." if len(names) > NAMES else ""
        name(f"{', '.join(names[:NAMES])}{several}  {rate:,.4g} TFLOP/s", (right, rate), (-4, 5), "right")
    start = max(left, axes.get_ylim()[0] / bandwidth) * 1.3
    name(f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s", (start, start * bandwidth), (8, -4), "left")
