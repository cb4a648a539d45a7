"""How near the GPU kernels come to their ceiling: a device-to-device copy that moves the same number of bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from analysis.bench.timer import Call, gpu_clock, in_turns
from dsq.formats import BFP, FixedPoint, Format, Layout
from dsq.kernels.triton import codec, masks

Row = dict[str, Any]
#: values of a tensor: 512 MiB of float32, many times any cache
VALUES = 1 << 27
COLUMNS = 4096
#: of the copy's bandwidth, what pack and unpack are to reach at the tuned widths
TARGET = 0.85


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel, ready to go."""

    what: Row
    moved: int  #: bytes read and written
    call: Call


def bandwidth(values: int = VALUES) -> Iterator[Row]:
    """A row for each kernel: its time, that of the copy, and the share of the copy's bandwidth that it reaches."""
    for run in _runs(values):
        half = run.moved // 2
        source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
        source.random_(0, 256)
        calls: dict[str, Call] = {"kernel": run.call, "copy": partial(target.copy_, source)}
        seconds = in_turns(calls, rounds=15, repeats=10, warm=3, clock=gpu_clock)
        kernel_ms, copy_ms = (1000 * median(seconds[name]) for name in calls)
        yield {
            **run.what,
            "MB moved": round(run.moved / 1e6),
            "us": round(1000 * kernel_ms, 1),
            "copy us": round(1000 * copy_ms, 1),
            "share of copy": round(copy_ms / kernel_ms, 3),
            "GB/s": round(run.moved / kernel_ms / 1e6),
        }


def _runs(values: int) -> Iterator[KernelRun]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(values // COLUMNS, COLUMNS, device="cuda").to(dtype)
        for dim in (-1, 0):
            for bits in (2, 4, 8, 16):
                yield _pack(x, dim, BFP(bits))
                yield _unpack(x, dim, BFP(bits))
            yield _pack(x, dim, BFP(4), seed=1)
            yield _quantize(x, dim, BFP(4), torch.float32)
            yield _quantize(x, dim, BFP(4), torch.bfloat16)
            yield _quantize(x, dim, BFP(4), torch.bfloat16, seed=1)
            yield _pack(x, dim, BFP(5))
            yield _unpack(x, dim, BFP(5))
            yield _pack(x, dim, BFP(4, 12))
        yield _pack(x, -1, FixedPoint(4))
        yield _unpack(x, -1, FixedPoint(4))
        yield from _masks(x.view(-1))


def _what(op: str, x: torch.Tensor, dim: int, fmt: Format, seed: int | None) -> Row:
    return {
        "op": op,
        "type": str(x.dtype).removeprefix("torch."),
        "boxes along": "rows" if dim == 0 else "columns",
        "bits": fmt.bits,
        "box": fmt.box or "tensor",
        "rounding": "nearest" if seed is None else "stochastic",
    }


def _pack(x: torch.Tensor, dim: int, fmt: Format, seed: int | None = None) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    codes, scales = codec.pack(x, fmt, layout, seed)
    reads = x.nbytes if codec.holds_boxes(fmt, layout) else 2 * x.nbytes
    moved = reads + codes.nbytes + scales.nbytes
    return KernelRun(_what("pack", x, dim, fmt, seed), moved, lambda: codec.pack(x, fmt, layout, seed))


def _masks(x: torch.Tensor) -> Iterator[KernelRun]:
    bits = masks.pack_mask(x, 0.0, math.nan, True)
    what = {**_what("pack", x, -1, FixedPoint(2), None), "bits": 1, "box": "mask"}
    moved = x.nbytes + bits.nbytes
    yield KernelRun(what, moved, lambda: masks.pack_mask(x, 0.0, math.nan, True))
    unpack = partial(masks.unpack_mask, bits, x.numel(), 0.0, 1.0, x.dtype)
    yield KernelRun({**what, "op": "unpack"}, moved, unpack)
    yield KernelRun({**what, "op": "apply"}, moved + x.nbytes, lambda: masks.apply_mask(bits, x))


def _unpack(x: torch.Tensor, dim: int, fmt: Format) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    codes, scales = codec.pack(x, fmt, layout, None)
    moved = x.nbytes + codes.nbytes + scales.nbytes
    return KernelRun(
        _what("unpack", x, dim, fmt, None), moved, lambda: codec.unpack(codes, scales, fmt, layout, x.dtype)
    )


def _quantize(x: torch.Tensor, dim: int, fmt: Format, out: torch.dtype, seed: int | None = None) -> KernelRun:
    layout = Layout.of(x.shape, dim)
    moved = x.nbytes + x.numel() * out.itemsize
    what = _what(f"quantize to {str(out).removeprefix('torch.')}", x, dim, fmt, seed)
    return KernelRun(what, moved, lambda: codec.quantize(x, fmt, layout, seed, out))
