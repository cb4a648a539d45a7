"""Print what compiled steps of a block launch, move and save on an H100 that is not there: nothing is measured.

    python -m analysis.gpu.traced [--width 2048]

Inductor traces and generates the CUDA code of a block on a CPU build of PyTorch; a small library stands for the device
(fake_cuda.cpp), and no kernel is compiled. Bytes are Inductor's own count, each buffer read or written once. Saved bits
are those a token and unit of width, beside the block's input. The time is an estimate: FLOPs of products at 700
TFLOP/s, of attention at 350, and the bytes of all other kernels at 3.0 TB/s, the rates that the H100's steps reached
(docs/gpu.md). Needs Triton, and g++ for the library.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import dsq
from analysis.models import EncoderBlock
from dsq.command import OneLineParser, Record, table

BYTES_A_SECOND, PRODUCT_FLOPS, ATTENTION_FLOPS = 3.0e12, 700e12, 350e12
BATCH, TOKENS = 8, 1024
H100 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
)  # fmt: skip
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
)  # fmt: skip
aten = torch.ops.aten


class Traced:
    """One generated graph: its launches, bytes, estimated seconds, and what it saves if it is a forward."""

    def __init__(self, lowering: GraphLowering, code: str) -> None:
        self.is_backward = bool(lowering.is_backward)
        body = code[code.index("def call") :]
        self.launches = re.findall(r"(triton_\w+)\.run\(|(?:extern_kernels\.|torch\.ops\.aten\.)([\w.]+)\(", body)
        self.moved, *_ = lowering.count_bytes()
        module: Any = lowering.module
        graph: torch.fx.Graph = module.graph
        self.seconds = sum(_library_seconds(node) for node in graph.nodes) + _kernel_bytes(lowering) / BYTES_A_SECOND
        results: Any = graph.output_node().args[0]
        self.saved_bytes = sum(
            node.meta["val"].nbytes
            for node in results[1:]
            if isinstance(node, torch.fx.Node) and node.op != "placeholder" and isinstance(node.meta["val"], Tensor)
        )


def _library_seconds(node: torch.fx.Node) -> float:
    """Return how long a product or attention takes by its FLOPs; 0 for other nodes."""
    match node.target:
        case aten.mm.default | aten.addmm.default:
            (rows, inner), (_, columns) = (a.meta["val"].shape for a in node.args[-2:])  # type: ignore[union-attr]
            return 2 * rows * inner * columns / PRODUCT_FLOPS
        case aten._scaled_dot_product_flash_attention.default:
            factor, query = 4, node.args[0]
        case aten._scaled_dot_product_flash_attention_backward.default:
            factor, query = 10, node.args[1]
        case _:
            return 0.0
    batch, heads, tokens, width = query.meta["val"].shape  # type: ignore[union-attr]
    return factor * batch * heads * tokens * tokens * width / 2 / ATTENTION_FLOPS  # causal: half of it


def _kernel_bytes(lowering: GraphLowering) -> float:
    """Return the bytes that the graph's own kernels move, without those of products and attention."""
    nodes: list[Any] = lowering.scheduler.nodes
    library = ("ExternKernelOut", "FallbackKernel", "MultiOutput")
    return sum(
        node.get_read_write_buffers_sizes()
        for node in nodes
        if hasattr(node, "snodes") or type(node.node).__name__ not in library
    )


def _like(x: Tensor) -> Tensor:
    """Return a tensor as a graph's result, which the caller's fake mode makes."""
    return torch.empty_strided(tuple(map(int, x.shape)), tuple(map(int, x.stride())), dtype=x.dtype, device=x.device)


@contextlib.contextmanager
def fake_cuda() -> Iterator[list[Traced]]:
    """Inside, Inductor compiles for an H100, and what it generates is added to the list in place of being run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    graphs: list[Traced] = []
    values: dict[int, list[Any]] = {}
    run = GraphLowering.run

    def note_results(self: Any, *args: Any) -> Any:
        result = run(self, *args)
        values[id(self)] = [node.meta["val"] for node in self.module.graph.output_node().args[0] if node is not None]
        return result

    def compile_to_module(self: Any) -> Any:
        code, _ = self.codegen()
        graphs.append(Traced(self, getattr(code, "value", str(code))))
        self.cache_key, self.cache_path, self.cache_linemap = "", "/dev/null", []
        results = values.pop(id(self))
        return SimpleNamespace(call=lambda _: tuple(map(_like, results)), __file__="/dev/null", key="")

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, is_active=lambda: True,
        get_current_stream=lambda *_: 0,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": False, "device_count": 1, "current_device": 0, "synchronize": None,
        "get_device_properties": _PROPERTIES, "get_device_capability": (9, 0), "get_device_name": _PROPERTIES.name,
        "is_bf16_supported": True, "device": contextlib.nullcontext(), "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for owner, name, value in (
            (driver, "_active", target),
            (torch.accelerator, "is_available", lambda: False),
            (DeviceProperties, "create", classmethod(lambda *_: H100)),
            (GraphLowering, "run", note_results),
            (GraphLowering, "compile_to_module", compile_to_module),
        ):
            stack.enter_context(patch.object(owner, name, value))
        for passes in ("joint_graph", "post_grad"):
            stack.enter_context(patch(f"torch._inductor.fx_passes.{passes}.lazy_init", lambda *_: None))
        options = {"fx_graph_cache": False, "force_disable_caches": True, "joint_graph_constant_folding": False}
        stack.enter_context(inductor_config.patch({**options, "compile_threads": 1, "worker_suppress_logging": True}))
        lazy = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        stack.enter_context(functorch_config.patch(lazy))
        yield graphs


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
    """Call the attention that PyTorch picks on an H100."""
    result: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
    return result


#: budget of recomputation, bits of packing (None: no packing) and share of recomputed products
DESIGNS: dict[str, tuple[float, int | None, float]] = {
    "compiled bf16": (1.0, None, 0.0),
    "compiled, a checkpoint a block": (0.0, None, 0.0),
    "packed, 8 bits": (1.0, 6, 0.0),
    "packed, 6 bits": (1.0, 4, 0.0),
    "packed, 6 bits, fc1, q, k, v recomputed": (1.0, 4, 1.0),
}


def trace(width: int, budget: float, bits: int | None, products: float) -> list[Traced]:
    """Return the forward and the backward graph of a pre-LN block under bf16 autocast."""
    torch.compiler.reset()
    functions = SimpleNamespace(**vars(F) | {"scaled_dot_product_attention": _flash})
    with (
        fake_cuda() as graphs,
        functorch_config.patch(activation_memory_budget=budget),
        patch("analysis.models.F", functions),
        FakeTensorMode(),
    ):
        with torch.device("cuda"):
            block: nn.Module = EncoderBlock(width, width // 128, 4 * width, sdpa=True, causal=True)
        options = {}
        if bits is not None:
            dsq.stash.apply(block, "bfp", bits=bits, format="bfp")
            options = dsq.inductor_options(block, products)
        x = torch.empty(BATCH, TOKENS, width, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            torch.compile(block, fullgraph=True, options=options)(x)
    return graphs


def rows(width: int) -> Iterator[Record]:
    """Yield a row a design."""
    for name, design in DESIGNS.items():
        graphs = trace(width, *design)
        launches = " + ".join(str(len(graph.launches)) for graph in graphs)
        moved, seconds = (sum(getattr(graph, field) for graph in graphs) for field in ("moved", "seconds"))
        bits = 8 * sum(graph.saved_bytes for graph in graphs if not graph.is_backward) / (BATCH * TOKENS * width)
        record = {"design": name, "launches": launches, "GB": f"{moved / 1e9:.2f}"}
        yield record | {"ms (estimated)": f"{1e3 * seconds:.2f}", "saved bits": f"{bits:.1f}"}


def _library() -> str:
    """Build the library that stands for the device; return its path."""
    root, source = Path(torch.__file__).parent, Path(__file__).with_name("fake_cuda.cpp")
    path = Path(tempfile.mkdtemp()) / "libfake_cuda.so"
    places = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(path), *places]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    return str(path)


if __name__ == "__main__":
    parser = OneLineParser(prog="python -m analysis.gpu.traced", description=__doc__)
    parser.add_argument("--width", type=int, default=2048, help="of the block, a multiple of 128")
    arguments = parser.parse_args()
    if "libfake_cuda" not in os.environ.get("LD_PRELOAD", ""):  # PyTorch looks for devices when it is imported
        os.environ["LD_PRELOAD"] = _library()
        os.execv(sys.executable, [sys.executable, "-m", "analysis.gpu.traced", *sys.argv[1:]])
    print(f"A block of width {arguments.width:,}, {BATCH} x {TOKENS:,} tokens, bf16 autocast, on paper\n")
    print(table(list(rows(arguments.width))))
