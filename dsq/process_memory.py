"""Let a training process return freed memory to the system, by two settings.

glibc, above all before 2.38, does not reuse a freed block for a request of the same size, so the heap keeps most of the
floats that a forward frees. M_MMAP_THRESHOLD gives large blocks mappings of their own, which return to the system at
the cost of page faults; huge pages avoid most of these (docs/performance.md has the measurements). M_TRIM_THRESHOLD
keeps 64 MiB of smaller blocks: the other setting disables glibc's own choice, and allocating them again took 5 to 9 %
of a step. PyTorch uses huge pages if an environment variable is set before its first tensor: ``import dsq`` sets it.
dsq.convert and stash.apply make these settings on machines with huge pages, and change nothing on others.
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

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  #: PyTorch's environment variable, read once, at its first tensor
SWITCH = "DSQ_ALLOCATOR"  #: 0: dsq does not change the settings of the process
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MIN_MAPPED_BYTES = 2**22
_TRIM_THRESHOLD_BYTES = 2**26  #: unused bytes at the end of the heap that stay
_HUGE_PAGE_BYTES = 2**21  #: bytes of a huge page
_TOO_LATE = (
    "torch made tensors before dsq was imported, as lightning and transformers' Trainer do when they are: "
    f"import dsq before them, or start Python with {HUGE_PAGES}=1"
)
_LOG = logging.getLogger("dsq")


@cache
def release_memory() -> bool:
    """Make both settings, once per process, and return whether freed blocks of 4 MiB or more return to the system.

    The log (INFO) says which setting took effect, or why not. DSQ_ALLOCATOR=0 in the environment leaves the process as
    it is. Call it before the first tensor.
    """
    if os.environ.get(SWITCH) == "0":
        return False
    mapped, huge = _map_large_blocks(), _missing_huge_pages()
    _LOG.info("freed memory %s", f"stays in the process: {mapped}" if mapped else "goes back to the system")
    _LOG.info("large blocks lie on %s", f"small pages: {huge}" if huge else "huge pages")
    return not mapped


@cache
def suit_a_packed_stash() -> None:
    """Make both settings if there are huge pages; otherwise warn of a reason that the user can remove, or log it."""
    reason = _missing_huge_pages()
    if reason == _TOO_LATE:
        warnings.warn(f"memory of the process will not drop with its stash: {reason}", stacklevel=3)
    elif reason:
        _LOG.info("freed memory stays in the process, as huge pages are missing: %s", reason)
    else:
        release_memory()


def resident() -> dict[str, int]:
    """Return the bytes of the resident set, "resident" now and "peak" so far; empty without /proc."""
    status = _STATUS.read_text(encoding="ascii") if _STATUS.exists() else ""
    sizes = re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", status, re.MULTILINE)
    return {{"VmRSS": "resident", "VmHWM": "peak"}[name]: int(kib) * 1024 for name, kib in sizes}


def _map_large_blocks() -> str:
    """Give every large block a mapping of its own, unless the user set a threshold; return the reason if not, or ""."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return ""
    return _tell_glibc({_M_MMAP_THRESHOLD: _MIN_MAPPED_BYTES, _M_TRIM_THRESHOLD: _TRIM_THRESHOLD_BYTES})


def keep_freed_memory() -> None:
    """Let glibc return nothing, for timings: fresh pages cost a random share of a step, up to a fifth."""
    _tell_glibc({_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0})


def _tell_glibc(settings: dict[int, int]) -> str:
    """Make settings of mallopt; return the reason if not, or ""."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return "" if all(mallopt(*setting) for setting in settings.items()) else "glibc refused"
    except (OSError, AttributeError):  # macOS, musl, Windows
        return "this C library has no such setting"


def ask_for_huge_pages() -> str:
    """Set the variable by which PyTorch puts blocks of 2 MiB and more on huge pages; return why not, or ""."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 leaves memory as it is"
    if not _MODES.exists() or "[never]" in _MODES.read_text(encoding="ascii"):
        return "this system has none"
    return "" if os.environ.setdefault(HUGE_PAGES, "1") == "1" else f"{HUGE_PAGES} is set to something else than 1"


def _missing_huge_pages() -> str:
    """Ask for huge pages; return the reason that PyTorch does not use them, or ""."""
    reason, torch = ask_for_huge_pages(), sys.modules.get("torch")
    if reason or torch is None or "[always]" in _MODES.read_text(encoding="ascii"):
        return reason
    # PyTorch aligns a block of 2 MiB to a page if it read 1; glibc does not
    return "" if torch.UntypedStorage(_HUGE_PAGE_BYTES).data_ptr() % mmap.PAGESIZE == 0 else _TOO_LATE
