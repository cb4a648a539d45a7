"""Runs an analysis module on another checkout's dsq, to hold two revisions against each other."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import ROOT


def check_tree(tree: Path) -> Path:
    """``tree`` in full. Raises ValueError where it is no checkout of dsq."""
    if not (tree / "dsq").is_dir():
        raise ValueError(f"{tree}: no checkout of dsq")
    return tree.resolve()


def run_in(tree: Path, module: str, *arguments: str, below: Sequence[str] = ()) -> str:
    """What ``main(arguments)`` of ``module`` prints in a process whose dsq is that of ``tree``, started by the command
    ``below`` if one is given.

    ``module`` and all else that it imports are this checkout's, so it may use the public names of dsq alone. ``tree``
    needs its kernels built (python setup.py build_ext --inplace). Raises RuntimeError where the process fails.
    """
    code = f"import dsq, sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import main; main({list(arguments)!r})"
    command = [*below, sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process with the dsq of {tree} failed:\n{done.stderr}")
    return done.stdout
