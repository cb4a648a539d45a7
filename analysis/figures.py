"""How pictures look here, once this is imported, and how they are written."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dsq.command import write_whole

#: Okabe and Ito's colors: told apart with any color vision; line styles and markers differ besides
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
plt.rcParams.update({"grid.linewidth": 0.4, "legend.frameon": False})
plt.rcParams.update({"figure.constrained_layout.use": True, "savefig.dpi": 150})


def save(figure: Figure, path: Path) -> None:
    """Write the picture to path (.png or .svg), whole or not at all."""
    write_whole(path, figure.savefig)
    plt.close(figure)
