"""Memory on the CPU: the way from a tensor to an address, and the GEMMs' scratch memory.

Each thread keeps its scratch memory from call to call, because fresh pages cost more than filling them.
"""

import threading

import torch
from torch import Tensor

#: bytes of scratch memory that a thread keeps
KEPT = 16 << 20
_ALIGNMENT = 64
_thread = threading.local()
_BATCHED = (
    "a kernel of dsq was given a tensor without memory of its own, as vmap, is_grads_batched=True and "
    "jacobian(vectorize=True) make them: ask for one gradient at a time"
)


def addresses(*tensors: Tensor | None, strided: bool = False) -> list[int]:
    """Return the address of each tensor's first value, 0 for None and for an empty one. Kernels get no other address.

    Tensors are contiguous, unless ``strided``. Raises ValueError for one without memory of its size on the CPU: its
    storage was resized, or it is a zero tensor of PyTorch's (``torch._efficientzerotensor``), or on another device.
    """
    found = []
    for x in tensors:
        address = 0
        if x is not None and (size := _extent(x) if strided else x.nbytes):
            try:
                address, storage = x.data_ptr(), x.untyped_storage()
            except RuntimeError:
                raise RuntimeError(_BATCHED) from None
            if not address or not x.is_cpu or address + size > storage.data_ptr() + storage.nbytes():
                raise ValueError(
                    f"a tensor {tuple(x.shape)} of {x.dtype} on {x.device} has no memory of its size on the CPU: was "
                    "its storage resized or freed (FSDP, untyped_storage().resize_) before its last use?"
                )
        found.append(address)
    return found


def _extent(x: Tensor) -> int:
    """Bytes from the first value to the last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.itemsize * (last + 1) if x.numel() else 0


def scratch(size: int) -> Tensor:
    """Return ``size`` bytes or more.

    They are the thread's own memory, which its next call writes over; above KEPT, new memory, which the caller must
    hold until the kernel is done with it.
    """
    if size > KEPT:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    kept: Tensor | None = getattr(_thread, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _thread.scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
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
