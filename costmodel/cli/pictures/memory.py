"""The picture of a plan: memory over the step by category, its peak labelled with its cause."""

from pathlib import Path

import numpy as np

from costmodel.cli.pictures.figure import BLACK, BLUE, GREY, VERMILION, new_figure, save
from costmodel.model.memory import CATEGORIES, Memory

#: as PyTorch's memory profiler names them; the stash is a band of its own
COLOURS = {
    "parameters": "#009E73",
    "optimiser": "#56B4E9",
    "gradients": BLUE,
    "activations": VERMILION,
    "stash": "#CC79A7",
    "logits": "#F0E442",
    "temporary": GREY,
}
GIGA = 1e9


def draw_memory(path: Path, title: str, memory: Memory, budget: float) -> None:
    """Stacked areas over the operations of forward, backward and update; the budget as a line where it is near."""
    figure, axes = new_figure()
    axes.grid(visible=False)
    moments = memory.timeline
    bands = [name for name in COLOURS if any(moment.categories.get(name, 0) for moment in moments)]
    assert set(COLOURS) == set(CATEGORIES)
    sizes = np.array([[moment.categories.get(name, 0.0) / GIGA for moment in moments] for name in bands])
    axes.stackplot(range(len(moments)), sizes, labels=bands, colors=[COLOURS[name] for name in bands], linewidth=0)
    top = memory.peak / GIGA
    at = moments.index(memory.most)
    axes.plot(at, top, "o", color=BLACK, markersize=5)
    side = ("right", -8) if at > len(moments) / 2 else ("left", 8)
    label = f"peak {top:,.2f} GB\n{memory.cause}"
    axes.annotate(label, (at, top), (side[1], 8), textcoords="offset points", ha=side[0], fontsize=9)
    if top < budget / GIGA < 1.5 * top:
        axes.axhline(budget / GIGA, color=BLACK, linestyle="--", linewidth=1)
    backward = next(i for i, moment in enumerate(moments) if moment.at.startswith("backward"))
    axes.set_xticks([0, backward, len(moments) - 1], ["forward", "backward", "update"])
    axes.set(ylabel="memory of a device (GB)", xlim=(0, len(moments) - 1), ylim=(0, 1.25 * top), title=title)
    axes.legend(loc="upper right", ncols=4, fontsize=8, frameon=False)
    save(figure, path)
