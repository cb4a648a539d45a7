"""Let a training process give freed memory back to the system: two settings, best made before the first tensor.

glibc keeps freed blocks behind live ones. M_MMAP_THRESHOLD gives large blocks mappings of their own, which go back, for
page faults; huge pages take most of these away. MiB above the state before the step / s: GPT, d 512, batch 16, loss in
chunks, one thread of an AMD EPYC (Zen 4), glibc 2.36, 2026-11-25 (``python -m analysis.bench process``). Huge pages too
late: whole 284 / 5.3. A threshold of 128 KiB: 34 MiB for 86 at d 128, but 1.6 x the time. Two steps, other jobs beside.
               fp32         autocast   checkpoint  linears    whole      mesa         gact
as it is       1,005 / 7.3  800 / 4.9  544 / 9.5   981 / 4.3  931 / 4.4  2,126 / 8.0  2,264 / 7.9
both settings  851 / 8.6    607 / 5.6  274 / 9.5   664 / 4.5  285 / 4.5  335 / 8.2    596 / 8.3
"""

import ctypes
import logging
import mmap
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  #: PyTorch's variable, which it reads once, when it makes its first tensor
SWITCH = "DSQ_ALLOCATOR"  #: 0: dsq leaves the settings of the process as they are
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD, _LARGE = -3, 2**20
_unwanted = False  #: as the program said


@dataclass(frozen=True)
class Settings:
    """What took effect."""

    returned: bool  #: a freed block of 1 MiB or more goes back to the system at once
    huge_pages: bool  #: blocks of 2 MiB or more lie on huge pages
    missing: tuple[str, ...] = ()  #: why each of them did not


def give_memory_back(wanted: bool = True) -> Settings:
    """Make both settings, once a process; the log (INFO) says what took effect. A refused setting is no error.

    ``dsq.convert`` with stash="all" and ``dsq.stash.apply`` call this, too late for huge pages: call it before the
    first tensor. ``wanted`` False, as DSQ_ALLOCATOR=0 does, leaves all as it is, in later calls too.
    """
    global _unwanted
    _unwanted = _unwanted or not wanted or os.environ.get(SWITCH) == "0"
    return Settings(False, False, (f"{SWITCH}=0, or the program, leaves them as they are",)) if _unwanted else _set()


def resident() -> dict[str, int]:
    """Return the bytes of the resident set, "resident" now and "peak" since the process began; empty where there is no
    /proc."""
    if not _STATUS.exists():
        return {}
    found = re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return {{"VmRSS": "resident", "VmHWM": "peak"}[name]: int(kib) * 1024 for name, kib in found}


@cache
def _set() -> Settings:
    mapped, huge = _map_large_blocks(), _ask_for_huge_pages()
    missing = tuple(f"{name}: {why}" for name, why in (("freed memory", mapped), ("huge pages", huge)) if why)
    logging.getLogger("dsq").info("; ".join(missing) or "freed memory goes back; large blocks lie on huge pages")
    return Settings(not mapped, not huge, missing)


def _map_large_blocks() -> str:
    """Give every large block a mapping of its own, unless the user set a threshold; why that is not done, or ""."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return ""
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
    if not _MODES.exists() or "[never]" in (modes := _MODES.read_text(encoding="ascii")):
        return "this system has none"
    if os.environ.setdefault(HUGE_PAGES, "1") != "1":
        return f"{HUGE_PAGES} is set to something else than 1"
    torch = sys.modules.get("torch")
    # PyTorch puts a block of 2 MiB on a page's border if it read 1; glibc a few bytes behind one
    if torch is None or "[always]" in modes or torch.UntypedStorage(2 * _LARGE).data_ptr() % mmap.PAGESIZE == 0:
        return ""
    return f"torch has made tensors: call dsq.give_memory_back() before that, or start with {HUGE_PAGES}=1"
