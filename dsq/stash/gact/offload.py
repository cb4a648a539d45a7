"""Codes swapped out of the device's memory until the backward asks for them (GACT, section 5.4; level L2).

CUDA: to pinned host memory on a stream of its own, while the forward goes on; the backward fetches on another stream,
    each code while the one saved after it is in use.
CPU: to unlinked files mapped into memory, whose pages the system writes out and reads back as it needs.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from dsq.stash.codes import Decode
from dsq.stash.gact.codecs import Code


@dataclass(eq=False)
class Offloaded:
    """Reads a code whose tensors were moved out."""

    decode: Decode
    slots: "list[FileSlot | CudaSlot]"
    before: "Offloaded | None"  #: the one saved before: the backward will ask for it next

    def __call__(self, codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        return self.decode([slot.take() for slot in self.slots], dtype)

    def fetch(self) -> None:
        """Start to bring the tensors back."""
        for slot in self.slots:
            slot.fetch()


class Offload:
    """Moves the codes of one forward out, in order. `directory`: of the CPU's files (None: the system's)."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self.nbytes = 0  #: moved out
        self.last: ref[Offloaded] | None = None  #: weak: the stash is its graph's

    def __call__(self, code: Code) -> Code:
        tensors, decode = code
        self.nbytes += sum(tensor.nbytes for tensor in tensors)
        slots: list[FileSlot | CudaSlot]
        if tensors[0].is_cuda:
            slots = [CudaSlot(tensor) for tensor in tensors]
        else:
            slots = [FileSlot(tensor, self.directory) for tensor in tensors]
        moved = Offloaded(decode, slots, None if self.last is None else self.last())
        self.last = ref(moved)
        return tuple(slot.held for slot in slots), moved


class FileSlot:
    """A file mapped into memory (``held``, which autograd saves); reading it brings a tensor back."""

    def __init__(self, tensor: Tensor, directory: str | None) -> None:
        handle, path = tempfile.mkstemp(prefix="dsq-stash-", dir=directory)
        os.close(handle)
        self.held = torch.from_file(path, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        os.unlink(path)
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.held.copy_(tensor.contiguous().view(-1).view(torch.uint8))

    def fetch(self) -> None:
        pass  # the system reads pages as they are touched

    def take(self) -> Tensor:
        return self.held.view(self.dtype).view(self.shape)


_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    if (device, direction) not in _STREAMS:
        _STREAMS[device, direction] = torch.cuda.Stream(device)
    return _STREAMS[device, direction]


class CudaSlot:
    """Pinned host memory (``held``, which autograd saves) for a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        out = _stream(tensor.device, "out")
        self.device = tensor.device
        self.held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out):
            self.held.copy_(tensor, non_blocking=True)
            tensor.record_stream(out)  # its memory is not given away before the copy is done
            self.left = out.record_event()
        self.back: tuple[Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        """Start to bring it back; any number of times."""
        if self.back is None:
            inward = _stream(self.device, "in")
            inward.wait_event(self.left)
            with torch.cuda.stream(inward):
                self.back = self.held.to(self.device, non_blocking=True), inward.record_event()

    def take(self) -> Tensor:
        """The tensor on its own device, after a fetch."""
        assert self.back is not None, "take() comes after fetch()"
        tensor, arrived = self.back
        self.back = None  # a second consumer fetches again: keeping it would keep the whole stash on the device
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        return tensor
