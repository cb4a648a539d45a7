"""Forward and backward of six transformer blocks on a GPU: float32, bfloat16 autocast, and quantised linears."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis.bench.models import encoder
from analysis.bench.timer import Call, gpu_clock, in_turns

LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    ffn: int
    heads: int
    batch: int
    tokens: int  #: a sequence

    def __str__(self) -> str:
        return f"d {self.width}, ffn {self.ffn}, {self.batch * self.tokens} tokens"


SIZES = (Size(512, 2048, 8, 8, 128), Size(1024, 4096, 16, 32, 512))


def measure_steps(size: Size) -> Iterator[dict[str, Any]]:
    """A row for float32, bfloat16 autocast and each level: milliseconds run eagerly and replayed as a CUDA graph (which
    leaves the host out), each over float32's too, and the peak of allocated memory."""
    if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError("float32 products are set to use TF32: the comparison is with true float32")
    x = torch.randn(size.batch, size.tokens, size.width, device="cuda")
    plain = encoder(6, size.width, size.heads, size.ffn).cuda()
    steps: dict[str, Call] = {
        "float32": _step(copy.deepcopy(plain), x, nullcontext),
        "bfloat16 autocast": _step(copy.deepcopy(plain), x, lambda: torch.autocast("cuda", torch.bfloat16)),
    }
    for level in LEVELS:
        model = copy.deepcopy(plain)
        dsq.convert(model, dsq.DSQConfig(levels=(dsq.Precision.parse(level),)))
        steps[f"dsq {level}"] = _step(model, x, nullcontext)
    del plain

    peaks = {name: _peak(step) for name, step in steps.items()}
    eager = _milliseconds(steps)
    replayed = _milliseconds({name: _graphed(step).replay for name, step in steps.items()})
    for name in steps:
        yield {
            "step": str(size),
            "linears": name,
            "eager ms": round(eager[name], 3),
            "over float32": round(eager[name] / eager["float32"], 2),
            "graph ms": round(replayed[name], 3),
            "graph over float32": round(replayed[name] / replayed["float32"], 2),
            "peak MiB": round(peaks[name] / 2**20),
        }


def _milliseconds(steps: dict[str, Call]) -> dict[str, float]:
    seconds = in_turns(steps, rounds=15, repeats=3, warm=3, clock=gpu_clock)
    return {name: 1000 * median(taken) for name, taken in seconds.items()}


def _step(model: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager]) -> Call:
    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with context():
            y = model(x)
        y.float().square().mean().backward()

    return step


def _peak(step: Call) -> int:
    """Bytes that a step allocates at its height, above what was there before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _graphed(step: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
