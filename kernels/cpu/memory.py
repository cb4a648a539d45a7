"""Memory on the CPU: checked addresses of tensors, and scratch memory of the GEMMs.

Each thread reuses its scratch memory, because new pages cost more than filling them.
"""

import threading

import torch
from torch import Tensor

#: the largest scratch memory in bytes that a thread reuses
MAX_REUSED_BYTES = 16 << 20
_ALIGNMENT = 64
_thread = threading.local()
_BATCHED = (
    "a kernel of dsq was given a tensor without memory of its own, as vmap, is_grads_batched=True and "
    "jacobian(vectorize=True) make them: ask for one gradient at a time"
)


def addresses(*tensors: Tensor | None, strided: bool = False) -> list[int]:
    """Return the address of each tensor's first value; 0 for None and for an empty tensor.

    Every input address of a kernel comes from here. Tensors must be contiguous, unless ``strided``. Raises ValueError
    for a tensor without memory of its size on the CPU: its storage was resized, or it is a zero tensor of PyTorch's
    (``torch._efficientzerotensor``), or it is on another device.
    """
    result = []
    for x in tensors:
        address = 0
        if x is not None and (size := _extent(x) if strided else x.nbytes):
            try:
                address = x.data_ptr()
                storage = x.untyped_storage()
            except RuntimeError:
                raise RuntimeError(_BATCHED) from None
            if not address or not x.is_cpu or address + size > storage.data_ptr() + storage.nbytes():
                raise ValueError(
                    f"a tensor {tuple(x.shape)} of {x.dtype} on {x.device} has no memory of its size on the CPU: was "
                    "its storage resized or freed (FSDP, untyped_storage().resize_) before its last use?"
                )
        result.append(address)
    return result


def _extent(x: Tensor) -> int:
    """Return the bytes from the first value to the end of the last."""
    last_offset = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.itemsize * (last_offset + 1) if x.numel() else 0


def scratch(size: int) -> Tensor:
    """Return ``size`` bytes or more.

    The thread's next call returns the same memory. Above MAX_REUSED_BYTES the memory is new, and the caller must hold
    it until the kernel has finished.
    """
    if size > MAX_REUSED_BYTES:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    memory: Tensor | None = getattr(_thread, "scratch", None)
    if memory is None or memory.numel() < size:
        memory = _thread.scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory


class Arena:
    """A division of scratch memory into aligned pieces. ``size`` is the end of the last piece."""

    def __init__(self, start: int = 0) -> None:
        self.size = start

    def allocate(self, size: int) -> int:
        """Return the offset of a new piece of ``size`` bytes."""
        offset = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset
