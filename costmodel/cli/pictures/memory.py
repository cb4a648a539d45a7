"""The picture of a plan: memory over the step by category, its peak labelled with its cause."""

from pathlib import Path

from costmodel.cli.pictures.figure import BLACK, BLUE, GREY, VERMILION, new_figure, save
from costmodel.model.memory import Memory
from costmodel.model.steps import CATEGORIES

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
    moments = len(memory.totals)
    sizes = {name: memory.bytes[:, CATEGORIES.index(name)] / GIGA for name in COLOURS}
    bands = {name: band for name, band in sizes.items() if band.any()}
    axes.stackplot(range(moments), *bands.values(), labels=bands, colors=[COLOURS[name] for name in bands], linewidth=0)
    top, at = memory.peak / GIGA, memory.moment
    axes.plot(at, top, "o", color=BLACK, markersize=5)
    side = ("right", -8) if at > moments / 2 else ("left", 8)
    label = f"peak {top:,.2f} GB\n{memory.cause}"
    axes.annotate(label, (at, top), (side[1], 8), textcoords="offset points", ha=side[0], fontsize=9)
    if top < budget / GIGA < 1.5 * top:
        axes.axhline(budget / GIGA, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xticks([0, len(memory.operations), moments - 1], ["forward", "backward", "update"])
    axes.set(ylabel="memory of a device (GB)", xlim=(0, moments - 1), ylim=(0, 1.25 * top), title=title)
    axes.legend(loc="upper right", ncols=4, fontsize=8, frameon=False)
    save(figure, path)
