"""The CPU kernels against copying the same values: ratios below 1 are faster than a copy."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from analysis.bench.peers import installed, plain_pytorch
from analysis.timing import Call, Race, keep_freed_memory, race
from dsq.formats import BFP, FixedPoint, Format, Layout
from dsq.kernels import dispatch
from dsq.kernels.cpu.backend import backend as cpu_backend
from dsq.kernels.cpu.library import library

COLUMNS = 4096
LARGE = 1 << 24
LAYER_SIZES = (1 << 18, 1 << 20, 1 << 22)
BOX = 16
AXES = {"columns": -1, "rows": 0}


def races(rounds: int, values: int = LARGE) -> Iterator[Race]:
    """Preallocated outputs, instruction sets, allocation counted (from memory that was freed), and peers.

    Raises ValueError without the kernels.
    """
    sets = instruction_sets()
    x = torch.randn(values // COLUMNS, COLUMNS)
    y = torch.empty_like(x)
    copy = ("copy_", lambda: y.copy_(x))
    where = f"{values:,} float32 values, outputs preallocated, {torch.get_num_threads()} threads"
    yield race(f"{sets[0]}, {where}", copy, ceilings(x, y) | preallocated(sets[0], x, y), rounds)
    for isa in sets[1:]:
        yield race(f"{isa}, {where}", copy, main_operations(isa, x, y, BFP(4, BOX)), rounds)
    keep_freed_memory()
    for size in LAYER_SIZES:
        small = torch.randn(size // 512, 512)
        title = f"{size:,} float32 values, outputs allocated"
        yield race(title, ("clone", small.clone), allocating(small), rounds)
    peers = dict(_peers(x, y))
    yield race(f"other implementations of 4 bits in boxes, {where}", copy, peers, max(rounds // 4, 3))


def instruction_sets() -> list[str]:
    """Those that the kernels have here, the best first. Raises ValueError without the kernels."""
    sets = list(library().instruction_sets())
    if not sets:
        raise ValueError("the native kernels are not built: python setup.py build_ext --inplace")
    return sets


def ceilings(x: Tensor, y: Tensor) -> dict[str, Call]:
    """What the memory allows: no pack takes less than reading x, no unpack less than writing y."""
    return {"reading alone (sum)": x.sum, "writing alone (fill_)": lambda: y.fill_(1)}


def preallocated(isa: str, x: Tensor, y: Tensor) -> dict[str, Call]:
    """Every operation on both axes, writing into memory that is there."""
    calls = main_operations(isa, x, y, BFP(4, BOX))
    for axis in AXES:
        for bits in (2, 8, 16, 5):
            calls |= {f"pack {bits} bits, {axis}": _pack(isa, x, BFP(bits, BOX), axis)}
            calls |= {f"unpack {bits} bits, {axis}": _unpack(isa, x, y, BFP(bits, BOX), axis)}
        half = torch.empty_like(y, dtype=torch.bfloat16)
        calls |= {f"quantise to bfloat16, {axis}": _quantize(isa, x, half, BFP(4, BOX), axis)}
        calls |= {f"unpack 4 bits to bfloat16, {axis}": _unpack(isa, x, half, BFP(4, BOX), axis)}
        calls |= {f"pack 4 bits stochastic, {axis}": _pack(isa, x, BFP(4, BOX), axis, seed=1)}
    calls |= {"quantise fixed point": _quantize(isa, x, y, FixedPoint(4), "columns")}
    calls |= {"quantise fixed point, static": _quantize(isa, x, y, FixedPoint(8, 4), "columns")}
    return calls


def main_operations(isa: str, x: Tensor, y: Tensor, fmt: Format) -> dict[str, Call]:
    """Pack, unpack and quantise on both axes, writing into memory that is there."""
    calls: dict[str, Call] = {}
    for axis in AXES:
        calls |= {
            f"pack {fmt.bits} bits, {axis}": _pack(isa, x, fmt, axis),
            f"unpack {fmt.bits} bits, {axis}": _unpack(isa, x, y, fmt, axis),
            f"quantise, {axis}": _quantize(isa, x, y, fmt, axis),
            f"quantise stochastic, {axis}": _quantize(isa, x, y, fmt, axis, seed=1),
        }
    return calls


def allocating(x: Tensor) -> dict[str, Call]:
    """The functions that dsq calls, their allocations included, as clone's are."""
    calls: dict[str, Call] = {}
    for axis, dim in AXES.items():
        codes, scales = dispatch.pack(x, BFP(4, BOX), dim)
        calls |= {
            f"pack 4 bits, {axis}": partial(dispatch.pack, x, BFP(4, BOX), dim),
            f"unpack 4 bits, {axis}": partial(
                dispatch.unpack, codes, scales, BFP(4, BOX), tuple(x.shape), dim, torch.float32
            ),
            f"quantise, {axis}": partial(dispatch.quantize, x, BFP(4, BOX), dim),
            f"quantise to bfloat16, {axis}": partial(dispatch.quantize, x, BFP(4, BOX), dim, None, torch.bfloat16),
        }
    return calls


def _peers(x: Tensor, y: Tensor) -> Iterator[tuple[str, Call]]:
    yield "this package", _quantize(next(iter(library().instruction_sets())), x, y, BFP(4, BOX), "columns")
    yield "plain PyTorch", partial(plain_pytorch, x)
    yield "torch.compile of the same", partial(torch.compile(plain_pytorch, dynamic=False), x)
    for name, quantizer in installed():
        yield name, partial(quantizer, x)


def _pack(isa: str, x: Tensor, fmt: Format, axis: str, seed: int | None = None) -> Call:
    layout, backend = Layout.of(x.shape, AXES[axis]), cpu_backend(isa)
    out = backend.pack(x, fmt, layout, seed)
    return lambda: backend.pack(x, fmt, layout, seed, out=out)  # type: ignore[call-arg]


def _unpack(isa: str, x: Tensor, y: Tensor, fmt: Format, axis: str) -> Call:
    layout, backend = Layout.of(x.shape, AXES[axis]), cpu_backend(isa)
    codes, scales = backend.pack(x, fmt, layout, None)
    return lambda: backend.unpack(codes, scales, fmt, layout, y.dtype, out=y)  # type: ignore[call-arg]


def _quantize(isa: str, x: Tensor, y: Tensor, fmt: Format, axis: str, seed: int | None = None) -> Call:
    layout, backend = Layout.of(x.shape, AXES[axis]), cpu_backend(isa)
    return lambda: backend.quantize(x, fmt, layout, seed, y.dtype, out=y)  # type: ignore[call-arg]
