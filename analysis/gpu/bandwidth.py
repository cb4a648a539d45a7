"""How near the GPU kernels come to their ceiling: a device-to-device copy that moves the same number of bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from analysis.gpu.machine import Machine
from analysis.timing import Call
from dsq.command.table import Record
from dsq.formats import BFP, FixedPoint, Format, Layout, SignedBFP, SignedNVInt
from dsq.kernels.triton import codec

COLUMNS = 4096
#: of a tensor: 512 MiB of float32, many times any cache
ROWS = 1 << 15
PACKED = (*map(BFP, (2, 4, 8, 16)), *map(SignedBFP, (2, 4)), *map(SignedNVInt, (2, 4)))
QUANTISED = (BFP(4), SignedBFP(4), SignedNVInt(4))


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel, ready to go."""

    what: Record
    moved: int  #: bytes read and written
    call: Call


def bandwidth(machine: Machine) -> Iterator[Record]:
    """A row for each kernel: its time, that of the copy, and the share of the copy's bandwidth that it reaches."""
    for run in _runs(machine):
        source, target = (torch.empty(run.moved // 2, dtype=torch.uint8, device=machine.device) for _ in range(2))
        source.random_(0, 256)
        taken = machine.milliseconds({"kernel": run.call, "copy": partial(target.copy_, source)})
        yield {
            **run.what,
            "MB moved": round(run.moved / 1e6),
            "us": round(1000 * taken["kernel"], 1),
            "copy us": round(1000 * taken["copy"], 1),
            "share of copy": round(taken["copy"] / taken["kernel"], 3),
            "GB/s": round(run.moved / taken["kernel"] / 1e6),
        }


def _runs(machine: Machine) -> Iterator[KernelRun]:
    rows, columns = (ROWS, COLUMNS) if machine.is_gpu else (16, 128)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, columns, device=machine.device).to(dtype)
        for dim in (-1, 0):
            for fmt in PACKED:
                yield _pack(x, dim, fmt)
                yield _unpack(x, dim, fmt)
            for fmt in QUANTISED:
                yield _pack(x, dim, fmt, seed=1)
                yield _quantize(x, dim, fmt, torch.bfloat16)
            yield _quantize(x, dim, BFP(4), torch.float32)
            yield _pack(x, dim, BFP(5))
            yield _pack(x, dim, BFP(4, 12))
        yield _pack(x, -1, FixedPoint(4))
        yield _unpack(x, -1, FixedPoint(4))
        yield from _masks(x.view(-1))


def _what(op: str, x: Tensor, dim: int, fmt: Format, seed: int | None) -> Record:
    return {
        "op": op,
        "type": str(x.dtype).removeprefix("torch."),
        "boxes along": "rows" if dim == 0 else "columns",
        "format": str(fmt),
        "rounding": "nearest" if seed is None else "stochastic",
    }


def _pack(x: Tensor, dim: int, fmt: Format, seed: int | None = None) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    codes, scales = codec.pack(x, fmt, layout, seed)
    moved = _reads(x, fmt, layout) + codes.nbytes + scales.nbytes
    return KernelRun(_what("pack", x, dim, fmt, seed), moved, lambda: codec.pack(x, fmt, layout, seed))


def _reads(x: Tensor, fmt: Format, layout: Layout) -> int:
    """Bytes of ``x`` that are read: once more where a scale is found by itself."""
    return (2 - (codec.holds_boxes(fmt, layout) and not fmt.tensor_bytes)) * x.nbytes


def _unpack(x: Tensor, dim: int, fmt: Format) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    codes, scales = codec.pack(x, fmt, layout, None)
    moved = x.nbytes + codes.nbytes + scales.nbytes
    unpack = partial(codec.unpack, codes, scales, fmt, layout, x.dtype)
    return KernelRun(_what("unpack", x, dim, fmt, None), moved, unpack)


def _quantize(x: Tensor, dim: int, fmt: Format, out: torch.dtype) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    moved = _reads(x, fmt, layout) + x.numel() * out.itemsize
    what = _what(f"quantize to {str(out).removeprefix('torch.')}", x, dim, fmt, None)
    return KernelRun(what, moved, lambda: codec.quantize(x, fmt, layout, None, out))


def _masks(x: Tensor) -> Iterator[KernelRun]:
    bits = codec.pack_mask(x, 0.0, math.nan, True)
    what = {**_what("pack", x, -1, FixedPoint(2), None), "format": "mask"}
    moved = x.nbytes + bits.nbytes
    yield KernelRun(what, moved, lambda: codec.pack_mask(x, 0.0, math.nan, True))
    unpack = partial(codec.unpack_mask, bits, x.numel(), 0.0, 1.0, x.dtype)
    yield KernelRun({**what, "op": "unpack"}, moved, unpack)
    yield KernelRun({**what, "op": "apply"}, moved + x.nbytes, lambda: codec.apply_mask(bits, x))
