"""Parts that pictures by matplotlib share: the figure and its colors, Okabe and Ito's, told apart by the color-blind
too."""

from typing import Any

from matplotlib.figure import Figure

BLACK, GREY, VERMILION, BLUE = "#000000", "#999999", "#D55E00", "#0072B2"
COLOURS = (VERMILION, BLUE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", BLACK)
SMALL = 8.5
WHITE_BOX: dict[str, Any] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def new_figure(columns: int = 1, size: tuple[float, float] = (9, 6)) -> tuple[Figure, Any]:
    """Return a figure of so many inches a column, and its axes: one, or a list of them side by side."""
    figure = Figure(figsize=(size[0] * columns, size[1]), dpi=150, layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.grid(True, which="major", color="#EEEEEE", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels[0] if columns == 1 else panels
