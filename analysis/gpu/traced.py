"""Inductor's CUDA graphs on an H100 that is not there: traced on a CPU build of PyTorch, and replayed on fake tensors.

A small library stands for the device (fake_cuda.cpp), and no kernel is compiled or run. A replay calls the wrapper that
Inductor generated: it allocates and frees what a GPU would, as tensors without memory. Needs Triton, and g++ for the
library; ``python -m analysis.gpu.estimate`` is the command.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties

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
_ATTENTION, _ATTENTION_BACKWARD = (f"_scaled_dot_product_flash_attention{end}" for end in ("", "_backward"))
_LIBRARY = {"mm", "addmm", "bmm", _ATTENTION, _ATTENTION_BACKWARD}


@dataclass(frozen=True, slots=True)
class Work:
    """What kernels do: FLOPs of products and attention, and the bytes that all others read and write."""

    bfloat16_flops: float = 0.0
    float32_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @staticmethod
    def of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> "Work":
        """Return the work of an operation of PyTorch's, by its name in aten."""
        match name:
            case "mm" | "addmm" | "bmm":
                a, b = inputs[-2:]
                flops = 2 * a.numel() * b.shape[-1]
                return Work(float32_flops=flops) if a.dtype is torch.float32 else Work(bfloat16_flops=flops)
            case "_scaled_dot_product_flash_attention":
                return Work(attention_flops=4 * _causal_macs(inputs[0]))
            case "_scaled_dot_product_flash_attention_backward":
                return Work(attention_flops=10 * _causal_macs(inputs[1]))
            case "embedding":  # reads the rows that it returns
                return Work(moved_bytes=2 * sum(x.nbytes for x in outputs))
            case "_fused_adamw_":  # reads parameters, gradients and two moments, and writes all but the gradients
                return Work(moved_bytes=7 / 4 * sum(x.nbytes for x in inputs))
        return Work(moved_bytes=sum(x.nbytes for x in (*inputs, *outputs)))


def _causal_macs(query: Tensor) -> float:
    """Return the multiplications of one of attention's products, of which half is masked."""
    batch, heads, tokens, width = query.shape
    return batch * heads * tokens * tokens * width / 2


class TracedGraph:
    """One generated graph: its launches, bytes and work, and the wrapper that allocates what it holds."""

    def __init__(self, lowering: GraphLowering, code: str) -> None:
        self.is_backward = bool(lowering.is_backward)
        body = code[code.index("def call") :]
        self.launches = re.findall(r"(triton_\w+)\.run\(|(?:extern_kernels\.|torch\.ops\.aten\.)([\w.]+)\(", body)
        self.moved_bytes, *_ = lowering.count_bytes()  # of products too
        module: Any = lowering.module
        library = map(_library_work, module.graph.nodes)
        self.work = sum(library, Work(moved_bytes=_kernel_bytes(lowering)))
        self.run: Callable[[list[Any]], Any] = _wrapper(code)


def _library_work(node: torch.fx.Node) -> Work:
    """Return the work of a product or attention; none for other nodes."""
    name = getattr(node.target, "_opname", "")
    values: list[Any] = [x.meta["val"] for x in node.args if isinstance(x, torch.fx.Node)]
    return Work.of(name, values, ()) if name in _LIBRARY else Work()


def _kernel_bytes(lowering: GraphLowering) -> float:
    """Return the bytes that the graph's own kernels move, without those of products and attention."""
    nodes: list[Any] = lowering.scheduler.nodes
    library = ("ExternKernelOut", "FallbackKernel", "MultiOutput")
    return sum(
        node.get_read_write_buffers_sizes()
        for node in nodes
        if hasattr(node, "snodes") or type(node.node).__name__ not in library
    )


class _Kernels:
    """Kernels that do nothing, by any name."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _wrapper(code: str) -> Callable[[list[Any]], Any]:
    """Return the generated function that calls a graph's kernels, with kernels that do nothing."""
    kernels, ignore = _Kernels(), lambda *_: None
    names: dict[str, Any] = dict.fromkeys(re.findall(r"(triton_\w+)\.run\(", code), kernels)
    names |= {"torch": torch, "extern_kernels": kernels, "get_raw_stream": ignore, "copy_if_misaligned": lambda x: x}
    names |= {"assert_size_stride": ignore, "assert_alignment": ignore, "reinterpret_tensor": _view}
    names["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=0)
    exec(code[code.index("class Runner") : code.index("def get_args")], names)
    wrapper: Callable[[list[Any]], Any] = names["call"]
    return wrapper


def _view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


@dataclass
class FakeDevice:
    """The H100 that is not there, inside of ``fake_h100``."""

    graphs: list[TracedGraph] = field(default_factory=list)  #: compiled so far
    in_graph: bool = False
    before_call: Callable[[TracedGraph], None] = lambda graph: None  #: called with each graph that runs

    def call(self, graph: TracedGraph, inputs: list[Any]) -> Any:
        self.before_call(graph)
        self.in_graph = True
        try:
            return graph.run(inputs)
        finally:
            self.in_graph = False


@contextlib.contextmanager
def fake_h100() -> Iterator[FakeDevice]:
    """Inside, Inductor compiles for an H100, and its graphs allocate and free, but compute nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    device = FakeDevice()

    def compile_to_module(self: Any) -> Any:
        code, _ = self.codegen()
        graph = TracedGraph(self, getattr(code, "value", str(code)))
        device.graphs.append(graph)
        self.cache_key, self.cache_path, self.cache_linemap = "", "/dev/null", []
        return SimpleNamespace(call=lambda inputs: device.call(graph, inputs), __file__="/dev/null", key="")

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, is_active=lambda: True,
        get_current_stream=lambda *_: 0,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": False, "device_count": 1, "current_device": 0, "synchronize": None,
        "get_device_properties": _PROPERTIES, "get_device_capability": (9, 0), "get_device_name": _PROPERTIES.name,
        "is_bf16_supported": True, "device": contextlib.nullcontext(), "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None, "_DeviceGuard": contextlib.nullcontext(), "set_device": None,
        "device_of": contextlib.nullcontext(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for owner, name, value in (
            (driver, "_active", target),
            (torch.accelerator, "is_available", lambda: False),
            (DeviceProperties, "create", classmethod(lambda *_: H100)),
            (GraphLowering, "compile_to_module", compile_to_module),
        ):
            stack.enter_context(patch.object(owner, name, value))
        for passes in ("joint_graph", "post_grad"):
            stack.enter_context(patch(f"torch._inductor.fx_passes.{passes}.lazy_init", lambda *_: None))
        options = {"fx_graph_cache": False, "force_disable_caches": True, "joint_graph_constant_folding": False}
        stack.enter_context(inductor_config.patch({**options, "compile_threads": 1, "worker_suppress_logging": True}))
        lazy = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        stack.enter_context(functorch_config.patch(lazy))
        torch.compiler.reset()
        yield device


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the attention that PyTorch picks on an H100, in place of F.scaled_dot_product_attention."""
    aten = torch.ops.aten
    result: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)[0]
    return result


def environment() -> dict[str, str]:
    """Return the environment of a process that can enter ``fake_h100``: PyTorch looks for devices when it is imported.

    The library is built anew in a temporary folder. Raises subprocess.CalledProcessError or FileNotFoundError if g++
    fails or is absent.
    """
    root, source = Path(torch.__file__).parent, Path(__file__).with_name("fake_cuda.cpp")
    path = Path(tempfile.mkdtemp()) / "libfake_cuda.so"
    places = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(path), *places]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    return {**os.environ, "LD_PRELOAD": str(path)}
