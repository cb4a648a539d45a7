"""What a person gets from races: a table on the terminal, a CSV, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from analysis.figures import BLUE, GREY, ORANGE, look, save
from analysis.timing import TRUSTED_STRAY, Race
from dsq.command import as_csv, table, write_text

_COLORS = {"usual": ORANGE, "in chunks": BLUE}
_MARKERS = {"none": "x", "late": "1", "first": "o"}
SHOWN = {"contestant": "", "ms": ".4g", "ratio": ".3f", "best/best": ".3f", "stray": ".0%"}


def rows(races: Sequence[Race]) -> list[dict[str, Any]]:
    """A row for each contestant of each race."""
    return [
        {
            "race": race.title,
            "contestant": result.name,
            "ms": 1000 * result.median_seconds,
            "ratio": result.ratio,
            "best/best": result.best_ratio,
            "stray": result.stray,
            "baseline": race.baseline,
            "trusted": race.trusted,
        }
        for race in races
        for result in race.results
    ]


def text(races: Sequence[Race]) -> str:
    """The same for the terminal, race by race."""
    parts = []
    for race in races:
        parts += [
            f"{race.title}: ratios to {race.baseline}",
            table(rows([race]), SHOWN),
            verdict(race),
            "",
        ]
    return "\n".join(parts)


def verdict(race: Race) -> str:
    """What the baseline's ratio to itself says of the machine."""
    measured = f"{race.baseline} against itself: {race.control.ratio:.3f}, stray {race.stray:.0%}"
    if race.trusted:
        return measured
    return f"TOO NOISY TO TRUST: {measured} (more than {TRUSTED_STRAY:.0%}); stop what else runs here and repeat"


def write(races: Sequence[Race], folder: Path, name: str) -> list[Path]:
    """Write ``name``.csv and ``name``.png into ``folder``; the paths."""
    csv, png = folder / f"{name}.csv", folder / f"{name}.png"
    write_text(csv, as_csv(rows(races)))
    picture(races, png)
    return [csv, png]


@look()
def picture(races: Sequence[Race], path: Path) -> None:
    """A panel a race, a bar a contestant, its length the ratio to the baseline (logarithmic)."""
    heights = [0.24 * len(race.results) + 0.9 for race in races]
    figure, axes = plt.subplots(len(races), 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False)
    for axis, race in zip(axes[:, 0], races, strict=True):
        names = [result.name for result in race.results]
        ratios = [result.ratio for result in race.results]
        bars = axis.barh(names, ratios, color=BLUE, height=0.7)
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.margins(x=0.12)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        doubt = "" if race.trusted else "  (TOO NOISY TO TRUST)"
        axis.set_title(f"{race.title}: time / {race.baseline}{doubt}", fontsize=9, loc="left")
    save(figure, path)


@look()
def process_picture(rows: pd.DataFrame, path: Path) -> None:
    """Memory of the process against time, and the front: a panel for each size, batch and number of threads."""
    panels = list(rows.groupby(["size", "threads", "batch"]))
    figure, grid = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 5.5), squeeze=False)
    for axes, ((_, threads, batch), panel) in zip(grid[0], panels, strict=True):
        for (loss, setting), group in panel.groupby(["loss", "setting"]):
            marker, label = _MARKERS[str(setting)], f"loss {loss}, setting {setting}"
            axes.plot(group["seconds"], group["above MiB"], marker, color=_COLORS[str(loss)], label=label, markersize=5)
        best = front(panel)
        axes.plot(best["seconds"], best["above MiB"], color=GREY, linewidth=0.8, drawstyle="steps-post", zorder=0)
        named = panel[(panel["loss"] == "in chunks") & (panel["setting"] == "first")]
        for row in pd.concat([named, best]).drop_duplicates().to_dict("records"):
            axes.annotate(
                row["setup"], (row["seconds"], row["above MiB"]), (5, 3), textcoords="offset points", fontsize=7
            )
        axes.set(yscale="log", xlabel="seconds a step", ylabel="MiB above the state before the step")
        axes.margins(x=0.15)  # for the names
        axes.set_title(f"batch {batch}, threads {threads}", loc="left")
    grid[0][0].legend(fontsize=7)
    save(figure, path)


def front(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are smaller than every faster one, fastest first."""
    ordered = rows.sort_values(["seconds", "above MiB"])
    least = ordered["above MiB"].cummin().shift(fill_value=float("inf"))
    return ordered[ordered["above MiB"] < least]
