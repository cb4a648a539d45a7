"""Let a training process give freed memory back to the system: two settings, best made before the first tensor.

glibc keeps freed blocks in its heap, behind live ones: a packed stash then hardly shrinks the process. Its
M_MMAP_THRESHOLD gives a large block a mapping of its own, which goes back when it is freed, at the price of page faults
for each new block; huge pages take these away. EVIDENCE
"""

import ctypes
import logging
import mmap
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  #: PyTorch's variable, which it reads once, when it makes its first tensor
SWITCH = "DSQ_ALLOCATOR"  #: 0: dsq leaves the settings of the process as they are
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_M_MMAP_THRESHOLD, _LARGE = -3, 2**20
_unwanted = False


@dataclass(frozen=True)
class Settings:
    """What took effect of ``give_memory_back``."""

    returned: bool  #: a freed block of 1 MiB or more goes back to the system at once
    huge_pages: bool  #: blocks of 2 MiB or more lie on huge pages
    missing: tuple[str, ...] = ()  #: why, a sentence for each that is False


def give_memory_back(wanted: bool = True) -> Settings:
    """Make both settings, once a process; the log (INFO) says what took effect. A refused setting is no error.

    ``dsq.convert`` with stash="all" and ``dsq.stash.apply`` call this, too late for huge pages: call it before the
    first tensor. ``wanted`` False, as DSQ_ALLOCATOR=0 does, leaves all as it is, in later calls too.
    """
    global _unwanted
    _unwanted = _unwanted or not wanted or os.environ.get(SWITCH) == "0"
    return Settings(False, False, (f"{SWITCH}=0, or the program, leaves them as they are",)) if _unwanted else _set()


@cache
def _set() -> Settings:
    refused = {"freed memory": _map_large_blocks(), "huge pages": _ask_for_huge_pages()}
    missing = tuple(f"{name}: {why}" for name, why in refused.items() if why)
    told = "; ".join(missing) or "freed blocks go back to the system, large ones lie on huge pages"
    logging.getLogger("dsq").info("memory of the process: %s", told)
    return Settings(not refused["freed memory"], not refused["huge pages"], missing)


def _map_large_blocks() -> str:
    """Give every large block a mapping of its own; why that is not done, or ""."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return ""  # the user's own threshold stays
    try:
        glibc = ctypes.CDLL("libc.so.6")
        addresses = {ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (glibc, ctypes.CDLL(None))}
        if len(addresses) > 1:
            return "another allocator stands in the place of glibc's"
        return "" if glibc.mallopt(_M_MMAP_THRESHOLD, _LARGE) else "glibc refused"
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return "this C library has no such setting"


def _ask_for_huge_pages() -> str:
    """Have PyTorch ask for them; why that is not done, or ""."""
    modes = _MODES.read_text(encoding="ascii") if _MODES.exists() else "[never]"
    if "[never]" in modes:
        return "this system has none"
    if os.environ.setdefault(HUGE_PAGES, "1") != "1":
        return f"{HUGE_PAGES} is set to something else than 1"
    torch = sys.modules.get("torch")
    # PyTorch puts a block of 2 MiB on a page's border if it read 1; glibc a few bytes behind one
    late = torch is not None and torch.UntypedStorage(2 * _LARGE).data_ptr() % mmap.PAGESIZE
    if late and "[always]" not in modes:
        return f"torch has made tensors: call dsq.give_memory_back() before that, or start with {HUGE_PAGES}=1"
    return ""
