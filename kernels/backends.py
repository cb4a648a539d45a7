"""One registry: which implementation of the kernels serves which kind of device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import masks, reference
from .grid import Grid, Layout
from .native_layer import NativeLayer

#: (values, low, high, nan_is_open) -> bits
PackMask = Callable[[Tensor, float, float, bool], Tensor]
#: (bits, count, closed, open, dtype) -> values
UnpackMask = Callable[[Tensor, int, float, float, torch.dtype], Tensor]
#: (bits, values) -> values
ApplyMask = Callable[[Tensor, Tensor], Tensor]
#: (values, in place) -> values, bits
Relu = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of the kernels. Inputs are contiguous; reference.py and masks.py say what each must compute."""

    name: str
    #: (x, grid, layout, seed, dtype) -> values
    quantize: Callable[[Tensor, Grid, Layout, int | None, torch.dtype], Tensor]
    #: (x, grid, layout, seed) -> codes, exponents
    pack: Callable[[Tensor, Grid, Layout, int | None], tuple[Tensor, Tensor]]
    #: (codes, exponents, grid, layout, dtype) -> values
    unpack: Callable[[Tensor, Tensor, Grid, Layout, torch.dtype], Tensor]
    layer: NativeLayer | None = None  #: a linear layer's passes in one call each; None: kernel by kernel
    pack_mask: PackMask = masks.pack_mask
    unpack_mask: UnpackMask = masks.unpack_mask
    apply_mask: ApplyMask = masks.apply_mask
    relu: Relu | None = None  #: of float32 values, in one pass; else PyTorch's, then pack_mask


REFERENCE = Backend("reference", reference.quantize, reference.pack, reference.unpack)

_by_device: dict[str, Backend] = {}


def register_backend(device_type: str, backend: Backend) -> None:
    """Let ``backend`` serve tensors whose ``device.type`` is ``device_type``, instead of the reference."""
    _by_device[device_type] = backend


def backend_for(device: torch.device) -> Backend:
    return _by_device.get(device.type, REFERENCE)


@contextmanager
def use_backend(backend: Backend, device_type: str = "cpu") -> Iterator[None]:
    """Serve ``device_type`` with ``backend`` inside the context (tests, benchmarks)."""
    before = _by_device.get(device_type)
    _by_device[device_type] = backend
    try:
        yield
    finally:
        if before is None:
            del _by_device[device_type]
        else:
            _by_device[device_type] = before
