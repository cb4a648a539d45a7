"""Measurements with dsq, a room a kind.

evidence/     the suite of real tasks that judges every default and every figure
translation/  a translation model from text to BLEU; the demo
bench/        times and memory on this CPU
revisions.py  digests of small trainings, to compare two checkouts
gpu/          the GPU kernels: agreement, bandwidth, steps; steps estimated without a GPU
timing.py     the one timer, and races of steps
results/      files that these gave
models.py     the small models that are measured in several rooms, and what a setup's name puts on one
results_page.py  the tables of the README and docs/, from results/; tables.py finds them in a page
figures.py    how pictures look
"""

import tempfile
from pathlib import Path

#: the checkout's folder
ROOT = Path(__file__).parents[1]


def make_folder(out: Path) -> None:
    """Make the folder --out, before the work whose results go there. Raises ValueError where none can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}; give a directory that can be written to") from None
