"""Seconds a call of dsq's public functions, as JSON: what analysis.revisions.against runs for each tree."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import dsq
from analysis.bench.step import converted, step_of
from analysis.models import encoder
from analysis.timing.allocator import keep_freed_memory
from analysis.timing.timer import Call, in_turns

#: turns of a call, of which the quickest counts
TURNS = 4
PRECISIONS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")
Calls = Iterator[tuple[str, Call]]


def step() -> Calls:
    """Six encoder blocks, d 512, 1,024 tokens."""
    yield from _steps(encoder(sdpa=True), torch.randn(8, 128, 512))


def tiny() -> Calls:
    """One 64 x 64 layer with 32 tokens, where what is not arithmetic shows."""
    yield from _steps(nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True))


def _steps(model: nn.Module, x: Tensor) -> Calls:
    """Forward and backward, plain and converted."""
    yield "fp32", step_of(model, x)
    for precision in PRECISIONS:
        yield precision, step_of(converted(model, levels=precision), x)


def kernels() -> Calls:
    """Quantise, pack and unpack 2^18, 2^20 and 2^24 float32 values, allocations included."""
    for power, columns in ((18, 512), (20, 512), (24, 4096)):
        x = torch.randn(2**power // columns, columns)
        for bits, dim in ((bits, dim) for bits in (4, 8) for dim in (-1, 0)):
            fmt, where = dsq.BFP(bits), f"2^{power}, {bits} bits, dim {dim}"
            for rounding in ("nearest", "stochastic") if bits == 4 else ("nearest",):
                yield f"quantize {where}, {rounding}", partial(dsq.quantize, x, fmt, dim, rounding)
                yield f"pack {where}, {rounding}", partial(dsq.pack, x, fmt, dim, rounding)
            yield f"unpack {where}", dsq.pack(x, fmt, dim).unpack


PARTS: dict[str, Callable[[], Calls]] = {"step": step, "kernels": kernels, "tiny": tiny}


def main(arguments: Sequence[str]) -> None:
    """Print {"part: call": seconds}; ``arguments``: the number of threads, then the parts, keys of PARTS."""
    threads, *parts = arguments
    keep_freed_memory()
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    calls = ((f"{part}: {name}", call) for part in parts for name, call in PARTS[part]())
    print(json.dumps({name: min(in_turns({name: call}, TURNS)[name]) for name, call in calls}))
