"""How a measuring process is to treat its memory."""

import ctypes
from contextlib import suppress


def keep_freed_memory() -> None:
    """Tell glibc to give nothing back: fresh pages cost up to a fifth of a step, or nothing, as luck has it."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX
