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


@cache
def _library() -> Path:
    """The counting malloc, compiled once a process and gone with it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    library = Path(folder) / "counting_malloc.so"
    subprocess.run([str(compiler()), "-O2", "-fPIC", "-shared", "-o", library, _SOURCE], check=True)
    return library


def run(*arguments: str) -> str:
    """Return what ``python arguments`` prints under the counting malloc."""
    # from the heap at any size: memory that malloc maps is rounded up to whole pages
    counted = {"LD_PRELOAD": str(_library()), "MALLOC_MMAP_THRESHOLD_": str(2**25), "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **counted})
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(module: str, *arguments: object) -> Any:
    """Run ``python -m module arguments``, counted, and return its last line, which is JSON."""
    return json.loads(run("-m", module, *map(str, arguments)).splitlines()[-1])


class Count:
    """The count of this process, which ``run`` has started."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
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


def step_bytes(forward: Callable[[], Tensor]) -> HeldBytes:
    """Count one step, ``forward().backward()``, of a counted process (CPU).

    forward: makes the loss of a batch that exists already. Gradients stay between the steps.
    """
    count = Count()
    for _ in range(WARM):
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
