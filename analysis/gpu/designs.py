"""Ways to save less in a compiled training step: estimated without a GPU (estimate.py), measured with one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import dsq
from analysis.gpu import Machine, Trial
from analysis.gpu.training import GPT2, LARGE, TINY, Size, Step, measured_step
from dsq.command import Record
from dsq.kernels.dispatch import use_backend
from dsq.kernels.triton.backend import TRITON
from dsq.stash.graphs.codec import BLOCK_SIZE, RowLayout, decode, encode


@dataclass(frozen=True)
class Design:
    """What is put on a model, and PyTorch's options while it is compiled."""

    setup: str  #: a name of analysis/models.py
    functorch: dict[str, Any] = field(default_factory=dict)
    inductor: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def options(self) -> Iterator[None]:
        """Inside, PyTorch compiles with the design's options."""
        with ExitStack() as stack:
            stack.enter_context(functorch_config.patch(self.functorch))
            stack.enter_context(inductor_config.patch(self.inductor))
            yield


#: PyTorch's own pass for saved tensors: 8 bits and one scale a row, of tensors of 1 MB and more
_FP8 = {
    "quant_type": "torch.float8_e4m3fn", "use_scaling": True, "size_in_mb": 1.0, "exclude_primals": True,
    "allowed_dtypes": "torch.bfloat16;torch.float32",
}  # fmt: skip
BASELINE = "compiled bf16"
#: the most valuable first: what packing costs is the first question to a GPU
DESIGNS = {
    BASELINE: Design("compiled + autocast"),
    "dsq, 6 bits": Design("bfp 4 + compiled + autocast"),
    # as if compiled with a checkpoint around each block, which recomputes no product whose result nobody reads
    "checkpoints": Design("compiled + autocast", {"activation_memory_budget": 0.0}),
    "dsq, 6 bits, products recomputed": Design("bfp 4 + compiled recomputing + autocast"),
    "memory budget 0.2": Design("compiled + autocast", {"activation_memory_budget": 0.2}),
    "fp8 pass, aggressive recomputation": Design(
        "compiled + autocast",
        {"aggressive_recomputation": True},
        {"post_grad_fusion_options": {"activation_quantization_aten_pass": _FP8}},
    ),
}


def compiled(machine: Machine) -> Iterator[Trial]:
    """The codes of graphs on the device; a row a design, of three sizes; the largest batches."""
    yield Trial("codes of 6 bits", partial(_codes, machine))
    baseline: dict[Size, float] = {}
    large, small = (LARGE, GPT2) if machine.is_gpu else (TINY, TINY)
    for name in DESIGNS:
        yield Trial(f"1.3 billion, {name}", partial(_measured, machine, name, large, baseline))
    if machine.is_gpu:
        yield Trial("1.3 billion, dsq, 6 bits: kernels", partial(_kernels, machine, DESIGNS["dsq, 6 bits"]))
    for name in (BASELINE, "dsq, 6 bits", "checkpoints"):
        yield Trial(f"124 million, {name}", partial(_measured, machine, name, small, baseline))
    for batch, name in product((32, 48, 64), ("checkpoints", "dsq, 6 bits, products recomputed")):
        size = large._replace(batch=batch) if machine.is_gpu else TINY
        yield Trial(f"1.3 billion, {batch} sequences, {name}", partial(_measured, machine, name, size, baseline))


def _codes(machine: Machine) -> Record:
    """Hold the codec that Inductor compiles for the device against the reference."""
    x = torch.randn(4096 if machine.is_gpu else 16, 256, generator=torch.Generator().manual_seed(0))
    x = (x * 2.0 ** torch.arange(-64, 64, 0.5)).bfloat16()
    layout, bits = RowLayout.of(x, BLOCK_SIZE), 6
    assert layout is not None
    encoder = torch.compile(partial(encode, bits=bits, layout=layout, fused=True))
    decoder = torch.compile(partial(decode, bits=bits, layout=layout, dtype=x.dtype, fused=True))
    values = decoder(*encoder(x.to(machine.device))).cpu()
    return {"disagree": "" if torch.equal(values, dsq.quantize(x, dsq.BFP(bits, BLOCK_SIZE))) else "values"}


def _measured(machine: Machine, name: str, size: Size, baseline: dict[Size, float]) -> Record:
    design = DESIGNS[name]
    torch.compiler.reset()
    try:
        with design.options():
            row = dict(measured_step(machine, design.setup, size))
    except torch.cuda.OutOfMemoryError:
        return {"peak MiB": "over the device's"}
    if name == BASELINE:
        baseline[size] = row["ms"]
    if size in baseline:
        row["x compiled bf16"] = round(row["ms"] / baseline[size], 3)
    return row


def _kernels(machine: Machine, design: Design) -> Record:
    """Print which kernels of a step take longest: those that pack come first if packing costs more than estimated."""
    torch.compiler.reset()
    with design.options(), use_backend(TRITON, machine.device.type):
        step = Step(machine, design.setup, LARGE)
        for _ in range(3):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
    return {"kernels": "compiled.log"}
