"""How pictures look here, and how they are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dsq.command import write_whole

#: Okabe and Ito's colours: told apart with any colour vision; line styles and markers differ besides
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"

_LOOK: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
}
_LOOK |= {"legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 150}


@contextmanager
def look() -> Iterator[None]:
    """Decorates a function that draws."""
    with plt.rc_context(_LOOK):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write the picture to path (.png or .svg), whole or not at all."""
    write_whole(path, figure.savefig)
    plt.close(figure)
