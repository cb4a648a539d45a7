"""How near the GPU kernels come to their ceiling: a device-to-device copy that moves the same number of bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from dsq.kernels import Grid, Layout, gpu

from analysis.bench.timer import Call, gpu_clock, in_turns

Row = dict[str, Any]
#: values of a tensor: 512 MiB of float32, many times any cache
VALUES = 1 << 27
COLUMNS = 4096
#: of the copy's bandwidth, what pack and unpack are to reach at the tuned widths
TARGET = 0.85


@dataclass(frozen=True, slots=True)
class Run:
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


def _runs(values: int) -> Iterator[Run]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(values // COLUMNS, COLUMNS, device="cuda").to(dtype)
        for dim in (-1, 0):
            for bits in (2, 4, 8, 16):
                yield _pack(x, dim, Grid(bits, 16))
                yield _unpack(x, dim, Grid(bits, 16))
            yield _pack(x, dim, Grid(4, 16), seed=1)
            yield _quantize(x, dim, Grid(4, 16), torch.float32)
            yield _quantize(x, dim, Grid(4, 16), torch.bfloat16)
            yield _quantize(x, dim, Grid(4, 16), torch.bfloat16, seed=1)
            yield _pack(x, dim, Grid(5, 16))
            yield _unpack(x, dim, Grid(5, 16))
            yield _pack(x, dim, Grid(4, 12))
        yield _pack(x, -1, Grid(4, 0))
        yield _unpack(x, -1, Grid(4, 0))
        yield from _masks(x.view(-1))


def _what(op: str, x: torch.Tensor, dim: int, grid: Grid, seed: int | None) -> Row:
    return {
        "op": op,
        "type": str(x.dtype).removeprefix("torch."),
        "boxes along": "rows" if dim == 0 else "columns",
        "bits": grid.bits,
        "box": grid.box or "tensor",
        "rounding": "nearest" if seed is None else "stochastic",
    }


def _pack(x: torch.Tensor, dim: int, grid: Grid, seed: int | None = None) -> Run:
    layout = Layout.of(x.shape, dim)
    codes, exponents = gpu.pack(x, grid, layout, seed)
    reads = x.nbytes if gpu.holds_boxes(grid, layout) else 2 * x.nbytes
    moved = reads + codes.nbytes + exponents.nbytes
    return Run(_what("pack", x, dim, grid, seed), moved, lambda: gpu.pack(x, grid, layout, seed))


def _masks(x: torch.Tensor) -> Iterator[Run]:
    bits = gpu.pack_mask(x, 0.0, math.nan, True)
    what = {**_what("pack", x, -1, Grid(1, 0), None), "box": "mask"}
    moved = x.nbytes + bits.nbytes
    yield Run(what, moved, lambda: gpu.pack_mask(x, 0.0, math.nan, True))
    unpack = partial(gpu.unpack_mask, bits, x.numel(), 0.0, 1.0, x.dtype)
    yield Run({**what, "op": "unpack"}, moved, unpack)
    yield Run({**what, "op": "apply"}, moved + x.nbytes, lambda: gpu.apply_mask(bits, x))


def _unpack(x: torch.Tensor, dim: int, grid: Grid) -> Run:
    layout = Layout.of(x.shape, dim)
    codes, exponents = gpu.pack(x, grid, layout, None)
    moved = x.nbytes + codes.nbytes + exponents.nbytes
    return Run(_what("unpack", x, dim, grid, None), moved, lambda: gpu.unpack(codes, exponents, grid, layout, x.dtype))


def _quantize(x: torch.Tensor, dim: int, grid: Grid, out: torch.dtype, seed: int | None = None) -> Run:
    layout = Layout.of(x.shape, dim)
    moved = x.nbytes + x.numel() * out.itemsize
    what = _what(f"quantize to {str(out).removeprefix('torch.')}", x, dim, grid, seed)
    return Run(what, moved, lambda: gpu.quantize(x, grid, layout, seed, out))
