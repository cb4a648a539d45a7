"""The README's picture: memory and time of a training step, from analysis/results/process.csv.

python -m analysis.bench process    # measures, in an hour
python -m analysis.front_picture    # draws
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt

from analysis.figures import BLUE, GREY, ORANGE, look, save

RESULTS = Path(__file__).parent / "results"
#: setups of that table: what a stranger calls each, its colour
SHOWN = {
    "fp32": ("fp32", GREY),
    "checkpoint": ("fp32, activation checkpointing", GREY),
    "autocast": ("bf16 autocast", GREY),
    "checkpoint + autocast": ("bf16 autocast, checkpointing", GREY),
    "linears": ("dsq, the linears' stash packed", BLUE),
    "whole": ("dsq, everything packed", ORANGE),
}


@look()
def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Write the picture of the rows measured with freed memory given back (setting "first")."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    chosen = {"loss": "in chunks", "setting": "first", "batch": "16", "size": "6 512 256 8192", "threads": "1"}
    for row in rows:
        if row["setup"] not in SHOWN or any(row[name] != value for name, value in chosen.items()):
            continue
        label, colour = SHOWN[row["setup"]]
        seconds, mib = float(row["seconds"]), float(row["above MiB"])
        axes.plot(seconds, mib, "o", color=colour, markersize=9)
        axes.annotate(label, (seconds, mib), (9, -4), textcoords="offset points", color=colour)
    axes.set(xlim=(4, 12.5), ylim=(0, 1000), xlabel="seconds a training step", ylabel="memory of the step, MiB")
    axes.text(4.1, 30, "better: down and left", color=GREY, style="italic")
    axes.grid()
    save(figure, path)


if __name__ == "__main__":
    with (RESULTS / "process.csv").open(encoding="utf-8") as file:
        draw(list(csv.DictReader(file)), RESULTS / "front.png")
