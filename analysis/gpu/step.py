"""Forward and backward of transformer blocks on a GPU: float32, bfloat16 autocast, and quantised linears."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dsq
from analysis.gpu.machine import Machine
from analysis.models import encoder
from analysis.timing import Call
from dsq.command.table import Record
from dsq.kernels.dispatch import use_backend
from dsq.kernels.triton.backend import TRITON

LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[4,4,4,8]", "[8,4,4,8]", "[16,4,4,16]")
FORMATS = ("bfp", "sbfp", "snvint")


@dataclass(frozen=True, slots=True)
class Size:
    blocks: int
    width: int
    ffn: int
    heads: int
    batch: int
    tokens: int  #: a sequence

    def __str__(self) -> str:
        return f"{self.blocks} blocks, d {self.width}, ffn {self.ffn}, {self.batch * self.tokens} tokens"


SIZES = (Size(6, 512, 2048, 8, 8, 128), Size(6, 1024, 4096, 16, 32, 512))
#: what torch.compile is given: it compiles every block anew
COMPILED = Size(2, 1024, 4096, 16, 32, 512)
TINY = Size(1, 32, 48, 2, 2, 8)


def steps(machine: Machine) -> Iterator[Record]:
    """A row for float32, bfloat16 autocast, and each format at each level: milliseconds run eagerly and replayed as a
    CUDA graph (which leaves the host out), each over float32's too, and the peak of what the allocator holds."""
    wanted = [(format, level) for format in FORMATS for level in LEVELS]
    for size in SIZES if machine.is_gpu else (TINY,):
        calls = _calls(machine, size, wanted if machine.is_gpu else wanted[4:5])
        with use_backend(TRITON, machine.device.type):
            eager = machine.milliseconds(calls)
            for name, call in calls.items():
                replayed = machine.milliseconds({"graph": _graphed(call).replay})["graph"] if machine.is_gpu else None
                yield {
                    "step": str(size),
                    "linears": name,
                    "eager ms": round(eager[name], 3),
                    "over float32": round(eager[name] / eager["float32"], 2),
                    "over bfloat16": round(eager[name] / eager["bfloat16 autocast"], 2),
                    "graph ms": replayed and round(replayed, 3),
                    "peak MiB": round(_peak(call) / 2**20) if machine.is_gpu else None,
                }


def compiled_steps(machine: Machine) -> Iterator[Record]:
    """The same of fewer blocks under torch.compile, beside the eager ones."""
    size, backend = (COMPILED, "inductor") if machine.is_gpu else (TINY, "aot_eager")
    with use_backend(TRITON, machine.device.type):
        calls = _calls(machine, size, [("sbfp", "[4,4,4,16]")])
        faster = _calls(machine, size, [("sbfp", "[4,4,4,16]")], lambda model: torch.compile(model, backend=backend))
        for name, call in calls.items():
            taken = machine.milliseconds({"eager": call, "compiled": faster[name]})
            yield {
                "step": str(size),
                "linears": name,
                "eager ms": round(taken["eager"], 3),
                "compiled ms": round(taken["compiled"], 3),
                "peak MiB, compiled": round(_peak(faster[name]) / 2**20) if machine.is_gpu else None,
            }


def _calls(
    machine: Machine,
    size: Size,
    wanted: list[tuple[str, str]],
    prepared: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model,
) -> dict[str, Call]:
    """A step of float32, of bfloat16 autocast, and of each wanted format and level."""
    if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError("float32 products are set to use TF32: the comparison is with true float32")
    x = torch.randn(size.batch, size.tokens, size.width, device=machine.device)
    plain = encoder(size.blocks, size.width, size.heads, size.ffn).to(machine.device)
    autocast = lambda: torch.autocast(machine.device.type, torch.bfloat16)  # noqa: E731
    models: dict[str, tuple[nn.Module, Callable[[], AbstractContextManager]]] = {
        "float32": (plain, nullcontext),
        "bfloat16 autocast": (copy.deepcopy(plain), autocast),
    }
    for format, level in wanted:
        model = copy.deepcopy(plain)
        dsq.convert(model, dsq.DSQConfig(levels=(dsq.Precision.parse(level),), format=format))
        models[f"{format} {level}"] = model, nullcontext
    return {name: _step(model, prepared(model), x, context) for name, (model, context) in models.items()}


def _step(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    context: Callable[[], AbstractContextManager],
) -> Call:
    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with context():
            y = forward(x)
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
