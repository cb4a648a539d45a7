"""Codes swapped out of the device's memory until the backward asks for them (GACT, section 5.4; level L2).

CUDA: to pinned host memory on a stream of its own, while the forward goes on; the backward fetches on another stream,
    each code while the one saved after it is in use.
CPU: to unlinked files mapped into memory, whose pages the system writes out and reads back as it needs.
"""

import os
import tempfile
from dataclasses import dataclass, fields, replace
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor

from dsq.stash.saved_tensors.forward_stash import Code


@dataclass(eq=False)
class Offloaded:
    """A code whose tensors were moved out; it is a code itself."""

    shell: Any  #: the code, with empty tensors in place of those moved
    slots: dict[str, "FileSlot | CudaSlot"]
    before: Self | None  #: the one saved before: the backward will ask for it next
    nbytes: int

    def unpack(self, dtype: torch.dtype) -> Tensor:
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        code: Code = replace(self.shell, **{name: slot.take() for name, slot in self.slots.items()})
        return code.unpack(dtype)

    def fetch(self) -> None:
        """Start to bring the tensors back."""
        for slot in self.slots.values():
            slot.fetch()


class Offload:
    """Moves the codes of one forward out, in order. `directory`: of the CPU's files (None: the system's)."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self.nbytes = 0  #: moved out
        self.last: ref[Offloaded] | None = None  #: weak: the stash is its graph's

    def __call__(self, code: Code) -> Offloaded:
        slots: dict[str, FileSlot | CudaSlot] = {}
        for field in fields(code):  # type: ignore[arg-type]
            value = getattr(code, field.name)
            if isinstance(value, Tensor) and value.numel():
                slots[field.name] = CudaSlot(value) if value.is_cuda else FileSlot(value, self.directory)
        shell = replace(code, **{name: torch.empty(0) for name in slots})  # type: ignore[type-var]
        moved = Offloaded(shell, slots, None if self.last is None else self.last(), code.nbytes)
        self.last = ref(moved)
        self.nbytes += code.nbytes
        return moved


class FileSlot:
    """A file mapped into memory; reading it brings a tensor back."""

    def __init__(self, tensor: Tensor, directory: str | None) -> None:
        handle, path = tempfile.mkstemp(prefix="dsq-stash-", dir=directory)
        os.close(handle)
        self.mapped = torch.from_file(path, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        os.unlink(path)
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.mapped.copy_(tensor.contiguous().view(-1).view(torch.uint8))

    def fetch(self) -> None:
        pass  # the system reads pages as they are touched

    def take(self) -> Tensor:
        return self.mapped.view(self.dtype).view(self.shape)


_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    if (device, direction) not in _STREAMS:
        _STREAMS[device, direction] = torch.cuda.Stream(device)
    return _STREAMS[device, direction]


class CudaSlot:
    """Pinned host memory for a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        out = _stream(tensor.device, "out")
        self.device = tensor.device
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out):
            self.host.copy_(tensor, non_blocking=True)
            tensor.record_stream(out)  # its memory is not given away before the copy is done
            self.left = out.record_event()
        self.back: tuple[Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        """Start to bring it back; any number of times."""
        if self.back is None:
            inward = _stream(self.device, "in")
            inward.wait_event(self.left)
            with torch.cuda.stream(inward):
                self.back = self.host.to(self.device, non_blocking=True), inward.record_event()

    def take(self) -> Tensor:
        """The tensor on its own device, after a fetch."""
        assert self.back is not None, "take() comes after fetch()"
        tensor, arrived = self.back
        self.back = None  # a second consumer fetches again: keeping it would keep the whole stash on the device
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        return tensor
