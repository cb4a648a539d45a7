"""The roofline: roofs by datatype, a dot for each class of operations, its size its share of the step's time."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from dsq.costmodel.cli.answer import Record
from dsq.costmodel.cli.pictures.figure import BLACK, COLOURS, GREY, LABEL, SMALL, around, name_points, new_figure, save
from dsq.costmodel.hardware.hardware import Hardware

TERA = 1e12
#: area of a dot, in square points: of no time, and of all of it
LEAST_AREA, MOST_AREA = 25, 500
#: dots nearer than this factor, in both directions, share a name
SAME = 1.12
#: a step's classes of operations with less of its time get a dot, but no name
NAMED_SHARE = 0.02
#: names that a roof's label lists
NAMES = 3
#: roofs nearer than this factor share a label
SAME_ROOF = 1.3
DATASHEET: dict[str, Any] = {"color": GREY, "linestyle": "--"}


def place(record: Record) -> tuple[float, float]:
    """The class's dot: operations a byte, TFLOP/s."""
    return record["flop_per_byte"], record["tflops"]


def draw_roofline(path: Path, workload: str, hardware: Hardware, records: list[Record]) -> None:
    """Datasheet roofs dashed, reached ones solid; from each dot (a record of `dsq-cost roofline --json`) a line up to
    its roof and the share it reaches."""
    figure, axes = new_figure()
    setups = list(dict.fromkeys(record["setup"] for record in records))
    colours = {setup: COLOURS[index % len(COLOURS)] for index, setup in enumerate(setups)}
    top, bandwidth = max(peak.flops for peak in hardware.peaks) / TERA, hardware.bandwidth / TERA
    intensities, attained = zip(*map(place, records), strict=True)
    right = max(*intensities, top / bandwidth) * 200
    axes.set(xscale="log", yscale="log", xlim=(min(intensities) / 3, right), ylim=(min(attained) / 3, 4 * top))
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}", fontsize=11)
    reached = "measured" if hardware.measured else "programs reach"
    handles = [Line2D([], [], marker="o", linestyle="", color=colours[setup], label=setup) for setup in setups]
    handles += [Line2D([], [], color=BLACK, label=reached), Line2D([], [], **DATASHEET, label="datasheet")]
    legend = axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=SMALL)
    taken = [legend.get_window_extent(), *_draw_roofs(axes, hardware)]
    for record in records:
        at, colour, area = place(record), colours[record["setup"]], LEAST_AREA + MOST_AREA * record["of_time"]
        axes.plot([at[0]] * 2, [at[1], record["roof_tflops"]], ":", color=colour, linewidth=1.2)
        axes.scatter(*at, s=area, color=colour, alpha=0.75, edgecolor="white", linewidth=0.8, zorder=5)
        taken.append(around(axes, at, math.sqrt(area / math.pi) * figure.dpi / 72))
    named = []
    for alike in coinciding(records):
        if max(_shares(alike).values()) >= NAMED_SHARE:
            colour = BLACK if len(_shares(alike)) > 1 else colours[alike[0]["setup"]]
            named.append((_text(alike), place(alike[0]), colour))
    name_points(axes, named, taken)
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


def _draw_roofs(axes: Axes, hardware: Hardware) -> list[Bbox]:
    """Draw the bandwidth's slope and the roofs with their names; returns the places of the names."""
    (left, right), bandwidth = axes.get_xlim(), hardware.bandwidth / TERA
    slope, rates = hardware.stated_bandwidth / TERA, [peak.flops / TERA for peak in hardware.peaks]
    for stated in {peak.stated / TERA for peak in hardware.peaks if peak.stated and slope}:
        axes.plot([left, stated / slope, right], [left * slope, stated, stated], **DATASHEET, linewidth=1)
    axes.plot([left, max(rates) / bandwidth], [left * bandwidth, max(rates)], color=BLACK, linewidth=1.6)
    for rate in [*rates, hardware.vector_flops / TERA]:
        axes.plot([rate / bandwidth, right], [rate, rate], color=BLACK, linewidth=1.6)
    taken = []

    def name(text: str, at: tuple[float, float], away: tuple[float, float], side: str) -> None:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": SMALL, "bbox": LABEL["bbox"]}
        taken.append(axes.annotate(text, at, away, **style).get_window_extent())

    for rate, names in roofs(hardware):
        several = " ..." if len(names) > NAMES else ""
        name(f"{', '.join(names[:NAMES])}{several}  {rate:,.4g} TFLOP/s", (right, rate), (-4, 5), "right")
    start = max(left, axes.get_ylim()[0] / bandwidth) * 1.3
    name(f"DRAM {hardware.bandwidth / 1e9:,.0f} GB/s", (start, start * bandwidth), (8, -4), "left")
    return taken


def coinciding(records: list[Record]) -> list[list[Record]]:
    """The records in groups that, near enough, share a place: those with most time first."""
    groups: list[list[Record]] = []
    for record in sorted(records, key=lambda record: -record["of_time"]):
        for group in groups:
            if all(1 / SAME < mine / other < SAME for mine, other in zip(place(record), place(group[0]), strict=True)):
                group.append(record)
                break
        else:
            groups.append([record])
    return groups


def _shares(alike: list[Record]) -> dict[str, float]:
    """Setup -> share of its step's time that these dots are."""
    shares: dict[str, float] = defaultdict(float)
    for record in alike:
        shares[record["setup"]] += record["of_time"]
    return shares


def _text(alike: list[Record]) -> str:
    """'fc: 44% of bf16, 65% of the time'; of several setups from the one to the other."""
    names = list(dict.fromkeys(record["class"] for record in alike))
    low, high = (round(100 * bound(_shares(alike).values())) for bound in (min, max))
    time = f"{low}" if low == high else f"{low} to {high}"
    reached = f"{alike[0]['tflops'] / alike[0]['roof_tflops']:.0%} of {alike[0]['roof']}"
    return f"{', '.join(names)}: {reached}, {time}% of time"
