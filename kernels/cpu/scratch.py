"""Memory on the CPU: results, and the GEMMs' scratch memory.

Each thread keeps its scratch memory from call to call, as fresh pages cost more than filling them.
"""

import threading

import torch
from torch import Tensor

#: bytes that are kept
KEPT = 64 << 20
_ALIGNMENT = 64
_thread = threading.local()


def empty_bytes(shape: tuple[int, ...]) -> Tensor:
    """An uninitialised uint8 tensor on the CPU, whatever the default device is."""
    return torch.empty(*shape, dtype=torch.uint8, device="cpu")  # sizes spread out parse in half the time


def scratch(size: int) -> Tensor:
    """``size`` bytes or more.

    The thread's own memory, which its next call writes over; above KEPT, new memory, which the caller must hold until
    the kernel is done with it.
    """
    if size > KEPT:
        return empty_bytes((size,))
    kept: Tensor | None = getattr(_thread, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _thread.scratch = empty_bytes((size,))
    return kept


class Arena:
    """Divides scratch memory into aligned pieces: ``size`` is where the last of them ends."""

    def __init__(self, start: int = 0) -> None:
        self.size = start

    def take(self, size: int) -> int:
        """The offset of a new piece of ``size`` bytes."""
        offset = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset
