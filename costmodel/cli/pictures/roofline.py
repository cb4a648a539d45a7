"""The roofline: roofs by datatype, a dot for each class of operations, its size its share of the step's time."""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from costmodel.cli.pictures.figure import BLACK, COLOURS, GREY, SMALL, Labels, new_figure, save
from costmodel.hardware.hardware import Hardware

TERA = 1e12
#: area of a dot, in square points: of no time, and of all of it
LEAST_AREA, MOST_AREA = 25, 500
#: dots nearer than this, in pixels, share a label
SAME = 14
#: a step's classes of operations with less of its time get a dot, but no label
NAMED_SHARE = 0.02
#: names that a label lists
NAMES = 3


@dataclass(frozen=True)
class Dot:
    """One class of operations (or operation) under one setup."""

    name: str
    setup: str
    intensity: float
    attained: float  #: operations a second
    roof: float  #: the most at this intensity on the unit it runs on
    unit: str
    share: float  #: of the step's time

    @property
    def at(self) -> tuple[float, float]:
        return self.intensity, self.attained / TERA

    @property
    def area(self) -> float:
        return LEAST_AREA + MOST_AREA * self.share

    @property
    def radius(self) -> float:
        return math.sqrt(self.area / math.pi)


def draw_roofline(path: Path, workload: str, hardware: Hardware, dots: list[Dot]) -> None:
    """Datasheet roofs dashed, reached ones solid; from each dot a line up to its roof and the share it reaches."""
    figure, axes = new_figure()
    setups = list(dict.fromkeys(dot.setup for dot in dots))
    roofs = _roofs(hardware)
    bandwidth = hardware.bandwidth / TERA
    left = min(dot.intensity for dot in dots) / 3
    right = max(max(dot.intensity for dot in dots), max(roofs) / bandwidth) * 200
    bottom = min(dot.attained for dot in dots) / TERA / 3
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, max(roofs) * 4))
    labels = Labels(axes)
    _draw_roofs(axes, hardware, roofs, labels)
    for dot in dots:
        colour = COLOURS[setups.index(dot.setup) % len(COLOURS)]
        axes.scatter(*dot.at, s=dot.area, color=colour, alpha=0.75, edgecolor="white", linewidth=0.8, zorder=5)
    groups = _coinciding(dots, labels)
    for alike in groups:
        (x, y), colour = alike[0].at, COLOURS[setups.index(alike[0].setup) % len(COLOURS)]
        axes.plot([x, x], [y, alike[0].roof / TERA], ":", color=colour, linewidth=1.2, zorder=4)
        labels.avoid_line([(x, y * 1.2), (x, alike[0].roof / TERA)])
        labels.avoid_point(alike[0].at, _radius(alike, labels) * figure.dpi / 72)
    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS[i % len(COLOURS)], label=setup)
        for i, setup in enumerate(setups)
    ]
    lowered = 0 < hardware.bandwidth < hardware.stated_bandwidth
    solid = "measured" if hardware.measured else "programs reach" if lowered else "datasheet"
    handles.append(Line2D([], [], color=BLACK, label=solid))
    handles += [Line2D([], [], color=GREY, linestyle="--", label="datasheet")] if lowered else []
    legend = axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=SMALL)
    labels.boxes.append(legend.get_window_extent())
    _label_slope(axes, hardware, max(roofs) / bandwidth, labels)
    for alike in groups:
        if max(_shares(alike).values()) >= NAMED_SHARE:
            colour = BLACK if len({dot.setup for dot in alike}) > 1 else COLOURS[setups.index(alike[0].setup)]
            labels.place(_text(alike), alike[0].at, colour, _radius(alike, labels))
    axes.set_xlabel("operational intensity (operations a DRAM byte)")
    axes.set_ylabel("rate (TFLOP/s)")
    axes.set_title(f"{workload}, one training step on {hardware.name}", fontsize=11)
    save(figure, path)


def _roofs(hardware: Hardware) -> dict[float, list[str]]:
    """Reached rate -> the datatypes that have it, elementwise arithmetic among them."""
    roofs: dict[float, list[str]] = defaultdict(list)
    for peak in hardware.peaks:
        roofs[peak.flops / TERA].append(peak.datatype)
    if not any(math.isclose(hardware.vector_flops / TERA, roof, rel_tol=0.3) for roof in roofs):
        roofs[hardware.vector_flops / TERA].append("vector")
    return roofs


def _draw_roofs(axes: Axes, hardware: Hardware, roofs: dict[float, list[str]], labels: Labels) -> None:
    (left, right), top = axes.get_xlim(), max(roofs)
    bandwidth, stated = hardware.bandwidth / TERA, hardware.stated_bandwidth / TERA
    dashed = {peak.datatype: peak.stated / TERA for peak in hardware.peaks if peak.stated}
    if stated:
        highest = max(dashed.values())
        axes.plot([left, highest / stated], [left * stated, highest], "--", color=GREY, linewidth=1)
        for value in dashed.values():
            axes.plot([value / stated, right], [value, value], "--", color=GREY, linewidth=1)
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color=BLACK, linewidth=1.6)
    labels.avoid_line([(left, left * bandwidth), (top / bandwidth, top)])
    for rate, names in roofs.items():
        axes.plot([rate / bandwidth, right], [rate, rate], color=BLACK, linewidth=1.6)
        labels.avoid_line([(rate / bandwidth, rate), (right, rate)])
        said = f" of {dashed[names[0]]:,.4g}" if names[0] in dashed and dashed[names[0]] > rate * 1.001 else ""
        above = max(rate, dashed.get(names[0], rate))
        name = axes.annotate(
            f"{', '.join(names)}  {rate:,.4g}{said} TFLOP/s",
            (right, above),
            (-4, 2),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
        )
        labels.boxes.append(name.get_window_extent())


def _label_slope(axes: Axes, hardware: Hardware, ridge: float, labels: Labels) -> None:
    """Under the bandwidth line, where no dot is in the way."""
    slope, stated = hardware.bandwidth / TERA, hardware.stated_bandwidth / TERA
    said = f" of {stated * 1e3:,.0f}" if stated > slope else ""
    start = max(axes.get_xlim()[0], axes.get_ylim()[0] / slope)
    (x0, y0), (x1, y1) = (labels.pixels((x, x * slope)) for x in (start, ridge))
    angle = math.atan2(y1 - y0, x1 - x0)
    for part in range(5, 60, 5):
        at = start * (ridge / start) ** (part / 100)
        text, style = f"DRAM {slope * 1e3:,.0f}{said} GB/s", {"rotation_mode": "anchor", "fontsize": SMALL}
        written = axes.annotate(
            text,
            (at, at * slope),
            (5, -11),
            textcoords="offset points",
            rotation=math.degrees(angle),
            **style,  # type: ignore[arg-type]
        )
        box = written.get_window_extent()
        if not any(box.overlaps(other) for other in labels.boxes):
            length, (x, y) = box.width / math.cos(angle), (box.x0, box.y0)
            for step in range(0, int(length), 8):  # its bounding box would take far more than its words do
                middle = x + step * math.cos(angle), y + step * math.sin(angle)
                labels.boxes.append(Bbox.from_extents(*middle, *middle).padded(8))
            return
        written.remove()


def _coinciding(dots: list[Dot], labels: Labels) -> list[list[Dot]]:
    """The dots in groups that, near enough, share a place: those with most time first."""
    groups: list[list[Dot]] = []
    for dot in sorted(dots, key=lambda dot: -dot.share):
        place = labels.pixels(dot.at)
        near = [group for group in groups if math.dist(place, labels.pixels(group[0].at)) < SAME]
        if near:
            near[0].append(dot)
        else:
            groups.append([dot])
    return groups


def _radius(alike: list[Dot], labels: Labels) -> float:
    """Points around the first dot that the dots of its group take."""
    middle, scale = labels.pixels(alike[0].at), labels.axes.figure.dpi / 72
    return max(math.dist(middle, labels.pixels(dot.at)) / scale + dot.radius for dot in alike)


def _shares(alike: list[Dot]) -> dict[str, float]:
    """Setup -> share of its step's time that these dots are."""
    return {setup: sum(dot.share for dot in alike if dot.setup == setup) for setup in {dot.setup for dot in alike}}


def _text(alike: list[Dot]) -> str:
    """'fc: 44% of bf16, 65% of the time'; of several setups from the one to the other."""
    names = list(dict.fromkeys(dot.name for dot in alike))
    low, high = (round(100 * bound(_shares(alike).values())) for bound in (min, max))
    time = f"{low}" if low == high else f"{low} to {high}"
    rest = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    reached = f"{alike[0].attained / alike[0].roof:.0%} of {alike[0].unit}"
    return f"{', '.join(names[:NAMES])}{rest}: {reached}, {time}% of time"
