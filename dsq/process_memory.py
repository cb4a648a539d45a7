"""Let a training process give freed memory back to the system, by two settings.

glibc (before 2.38 above all) does not give a freed block to a request of the same size: the heap keeps most of the
floats that a forward frees beside its codes. M_MMAP_THRESHOLD gives large blocks mappings of their own, which go back,
for page faults; huge pages take most of these away (docs/performance.md has the measurements). M_TRIM_THRESHOLD lets 64
MiB of smaller blocks stay: the other setting ends glibc's own choice, and to get them anew took 5 to 9 % of a step.
PyTorch asks for huge pages if a variable says so before its first tensor: ``import dsq`` sets it. dsq.convert and
stash.apply make these settings where huge pages are to be had, and leave the process as it is elsewhere.
"""

import ctypes
import logging
import mmap
import os
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  #: PyTorch's variable, which it reads once, when it makes its first tensor
SWITCH = "DSQ_ALLOCATOR"  #: 0: dsq leaves the settings of the process as they are
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE = 2**22
_STAYS = 2**26  #: bytes at the end of the heap
_HUGE = 2**21  #: bytes of a huge page
_TOO_LATE = (
    "torch made tensors before dsq was imported, as lightning and transformers' Trainer do when they are: "
    f"import dsq before them, or start Python with {HUGE_PAGES}=1"
)
_LOG = logging.getLogger("dsq")


class Settings(NamedTuple):
    """The settings that took effect."""

    returned: bool  #: a freed block of 4 MiB or more goes back to the system at once
    huge_pages: bool  #: blocks of 2 MiB or more lie on huge pages


def release_memory(wanted: bool = True) -> Settings:
    """Make both settings, once a process; the log (INFO) says which took effect, or why not.

    ``wanted`` False, as DSQ_ALLOCATOR=0 does, leaves the process as it is, in later calls too: call it before the first
    tensor.
    """
    if not wanted:
        os.environ[SWITCH] = "0"
    return Settings(False, False) if os.environ.get(SWITCH) == "0" else _set()


@cache
def suit_a_packed_stash() -> None:
    """Make both settings where page faults are cheap. Elsewhere a warning says what to do, or the log (INFO) why."""
    why = _missing_huge_pages()
    if why == _TOO_LATE:  # the one reason that a program can take away
        warnings.warn(f"the process will not shrink with its stash: {why}", stacklevel=3)
    elif why:
        _LOG.info("freed memory stays in the process, as huge pages are missing: %s", why)
    else:
        _set()


def resident() -> dict[str, int]:
    """Return the bytes of the resident set, "resident" now and "peak" so far; nothing where there is no /proc."""
    status = _STATUS.read_text(encoding="ascii") if _STATUS.exists() else ""
    found = re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", status, re.MULTILINE)
    return {{"VmRSS": "resident", "VmHWM": "peak"}[name]: int(kib) * 1024 for name, kib in found}


@cache
def _set() -> Settings:
    mapped, huge = _map_large_blocks(), _missing_huge_pages()
    _LOG.info("freed memory %s", f"stays in the process: {mapped}" if mapped else "goes back to the system")
    _LOG.info("large blocks lie on %s", f"small pages: {huge}" if huge else "huge pages")
    return Settings(not mapped, not huge)


def _map_large_blocks() -> str:
    """Give every large block a mapping of its own, unless the user set a threshold; return why not, or ""."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return ""
    return _tell_glibc({_M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _STAYS})


def keep_freed_memory() -> None:
    """Let glibc give nothing back, for timings: fresh pages cost up to a fifth of a step, or nothing, by luck."""
    _tell_glibc({_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0})


def _tell_glibc(settings: dict[int, int]) -> str:
    """Make settings of mallopt; return why not, or ""."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return "" if all(mallopt(*setting) for setting in settings.items()) else "glibc refused"
    except (OSError, AttributeError):  # macOS, musl, Windows
        return "this C library has no such setting"


def ask_for_huge_pages() -> str:
    """Set the variable by which PyTorch puts blocks of 2 MiB and more on huge pages; return why not, or ""."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0, or the program, leaves memory as it is"
    if not _MODES.exists() or "[never]" in _MODES.read_text(encoding="ascii"):
        return "this system has none"
    return "" if os.environ.setdefault(HUGE_PAGES, "1") == "1" else f"{HUGE_PAGES} is set to something else than 1"


def _missing_huge_pages() -> str:
    """Ask for huge pages; return why PyTorch does not use them, or ""."""
    why, torch = ask_for_huge_pages(), sys.modules.get("torch")
    if why or torch is None or "[always]" in _MODES.read_text(encoding="ascii"):
        return why
    # PyTorch puts a block of 2 MiB on a page's border if it read 1; glibc a few bytes behind one
    return "" if torch.UntypedStorage(_HUGE).data_ptr() % mmap.PAGESIZE == 0 else _TOO_LATE
