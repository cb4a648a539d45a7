"""Counts the bytes that the C allocator holds, outside of PyTorch and of dsq: nothing that a process keeps escapes.

Processes are started under counting_malloc.c (Linux with glibc and a C compiler), and read the count from inside.
"""

import atexit
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_SOURCE = Path(__file__).with_name("counting_malloc.c")
#: steps before the one that is counted: caches, estimates and gradients exist after them
WARM = 2


def compiler() -> str | None:
    """The C compiler, or None where processes cannot be counted."""
    return shutil.which("cc") if sys.platform == "linux" else None


def build(folder: Path) -> Path:
    """Compile the counting malloc into a folder; RuntimeError where there is no compiler, or it fails."""
    command = compiler()
    if command is None:
        raise RuntimeError("counting what malloc holds takes Linux and a C compiler named cc")
    library = folder / "counting_malloc.so"
    made = subprocess.run(
        [command, "-O2", "-fPIC", "-shared", "-o", str(library), str(_SOURCE)], capture_output=True, text=True
    )
    if made.returncode:
        raise RuntimeError(f"{command} did not compile {_SOURCE.name}: {made.stderr.strip()}")
    return library


def run(library: Path, arguments: list[str]) -> str:
    """Return what ``python arguments`` prints under the library. RuntimeError with its last words if it fails."""
    # from the heap at any size: memory that malloc maps is rounded up to whole pages
    counted = {"LD_PRELOAD": str(library), "MALLOC_MMAP_THRESHOLD_": str(2**25), "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **counted})
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def figures(module: str, *arguments: object) -> Any:
    """Run ``python -m module arguments``, counted, and return its last line, which is JSON."""
    return json.loads(run(_built(), ["-m", module, *map(str, arguments)]).splitlines()[-1])


@cache
def _built() -> Path:
    """The counting malloc, compiled once a process and gone with it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return build(Path(folder))


class Count:
    """The count of this process; RuntimeError where it was not started by ``run``."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "counting_malloc_live"):
            raise RuntimeError("this process is not counted: start it by tests.allocator.run")
        self._live, self._peak = library.counting_malloc_live, library.counting_malloc_peak
        self._live.restype = self._peak.restype = ctypes.c_int64
        self._reset_peak = library.counting_malloc_reset_peak
        self._fail, self._until_failure = library.counting_malloc_fail, library.counting_malloc_until_failure
        self._fail.argtypes, self._until_failure.restype = [ctypes.c_int64], ctypes.c_int64

    def live(self) -> int:
        """Bytes that malloc has given out and not got back."""
        return int(self._live())

    def peak(self) -> int:
        """The most that live() has been since reset_peak()."""
        return int(self._peak())

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._reset_peak()

    def fail(self, number: int) -> None:
        """Have the allocation of this number, from 1, of a tensor's memory fail; 0: none."""
        self._fail(number)

    def failed(self) -> bool:
        """Whether it has."""
        return bool(self._until_failure() <= 0)


@dataclass(frozen=True)
class HeldBytes:
    """One step, above what is held between steps; the batch and the gradients are there before it."""

    stash: int  #: at the end of the forward, while the loss is alive
    peak: int  #: the most during forward and backward
    left: int  #: after the step: what it did not give back


def step_bytes(forward: Callable[[], Tensor], warm: int = WARM) -> HeldBytes:
    """Count one step, ``forward().backward()``, of a counted process (CPU).

    forward: makes the loss of a batch that exists already. Gradients stay between the steps.
    """
    count = Count()
    for _ in range(warm):
        forward().backward()
    gc.collect()
    gc.disable()
    try:
        before = count.live()
        count.reset_peak()
        loss = forward()
        stash = count.live() - before
        loss.backward()
        peak = count.peak() - before
        del loss
    finally:
        gc.enable()
    gc.collect()
    return HeldBytes(stash, peak, count.live() - before)
