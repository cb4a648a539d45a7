"""The picture of process.py: memory against time, and the front that no other row is both smaller and faster than."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis.figures import BLUE, GREY, ORANGE, look, save

_COLORS = {"usual": ORANGE, "in chunks": BLUE}
_MARKERS = {"none": "x", "late": "1", "first": "o"}


@look()
def draw(rows: pd.DataFrame, path: Path) -> None:
    """Write the picture: a panel for each size of the model, batch and number of threads."""
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
