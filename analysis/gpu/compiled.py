"""Compile every GPU kernel that dispatch can launch, for GPUs that are not there: .ci/gpu-compile

    python -m analysis.gpu.compiled [--target sm_90]... [--part hot|edges|all]

Triton's compiler needs no device. Every variant of the kernels is compiled: of the hot launches, of the edges of each
size class, of the conformance cases; for every target below, in a process of its own. Nothing runs. The table has the
registers of a thread, spilled bytes, shared memory and the widest accesses. It exits 1 if a kernel does not compile,
takes more shared memory than the target has, or flushes subnormals, or if a hot one spills.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import dsq
from dsq.command import OneLineParser, Record, table
from dsq.formats import BFP, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.backend import DTYPES, Dtypes, LinearSpec
from dsq.kernels.conformance import CodecCase, cases
from dsq.kernels.triton import codec, codec_kernels
from dsq.kernels.triton.backend import TRITON
from dsq.kernels.triton.linear import TritonLinear
from dsq.precision import DEFAULT_LEVELS

#: bytes of shared memory that a block may have (CUDA programming guide, table of compute capabilities; CDNA: LDS)
TARGETS = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
}
PARTS = ("hot", "edges", "all")
LARGE = (4096, 4096)
#: formats of the default levels, of [4,3,3,8] and of the rest of the stash, and the paper's own
HOT = (SignedNVInt(3), SignedNVInt(4), SignedNVInt(6), BFP(8), BFP(4))
#: sizes at which another variant begins: one value, one column, one row, offsets of 64 bits
EDGES = (
    (1,),
    (4096, 1),
    (1, 4096),
    (codec.WIDE_NUMEL // 4096 - 1, 4096),
    (codec.WIDE_NUMEL // 4096, 4096),
    (codec.WIDE_NUMEL + 1,),
)


class KernelCall(NamedTuple):
    """One call of the backend that launches kernels."""

    what: str
    call: Callable[[], object]
    part: str = "all"  #: of PARTS


def kernel_calls() -> Iterator[KernelCall]:
    """Every launch that is compiled: hot ones first, then the edges of sizes, then the conformance cases."""
    for fmt, dtype, dim in itertools.product(HOT, DTYPES[:2], (-1, 0)):
        case = CodecCase(LARGE, dim, fmt, dtype, dtype)
        yield from _codec(case, "hot")
        yield from _codec(replace(case, seed=1), "edges")
    yield from _masks()
    for levels, seed in itertools.product((str(DEFAULT_LEVELS[0]), "[4,3,3,8]"), (None, 1)):
        yield from _layer(levels, seed)
    formats = (BFP(4), BFP(5, 64), SignedNVInt(3), FixedPoint(4))
    for sizes, fmt, seed in itertools.product(EDGES, formats, (None, 1)):
        for dim in range(-len(sizes), 0):
            yield from _codec(CodecCase(sizes, dim, fmt, torch.float32, torch.bfloat16, seed), "edges")
    for case in cases(TRITON):
        yield from _codec(case)


def _codec(case: CodecCase, part: str = "all") -> Iterator[KernelCall]:
    fmt, layout = case.format, Layout.of(case.shape, case.dim)
    x, packed = torch.empty(case.shape, dtype=case.dtype, device="meta"), _packed(fmt, layout)
    yield KernelCall(f"pack {case}", partial(codec.pack, x, fmt, layout, case.seed), part)
    yield KernelCall(f"quantize {case}", partial(codec.quantize, x, fmt, layout, case.seed, case.out), part)
    if case.seed is None or part == "all":
        yield KernelCall(f"unpack {case}", partial(codec.unpack, *packed, fmt, layout, case.out), part)


def _layer(levels: str, seed: int | None) -> Iterator[KernelCall]:
    """The passes of a layer, whose kernels round a tensor twice."""
    for dtypes in (Dtypes(*DTYPES[:1] * 3), Dtypes(*DTYPES[1::-1], DTYPES[1])):
        shape, (x, w, dy) = torch.Size(LARGE), (torch.empty(LARGE, dtype=it, device="meta") for it in dtypes)
        spec = LinearSpec(dsq.Quantizers.of(levels).linear_matmuls, dtypes, shape, shape, seed is not None)
        for gemm in (TRITON.gemms[0], TRITON.gemms[-1]):
            what, part = f"{_short(dtypes.x)} layer at {levels} by {gemm.name}", "edges" if seed else "hot"
            yield KernelCall(what, partial(_both_passes, spec, gemm.name, x, w, dy, seed), part)


def _both_passes(spec: LinearSpec, gemm: str, x: Tensor, w: Tensor, dy: Tensor, seed: int | None) -> None:
    forward, backward = TritonLinear().forward(spec, gemm), TritonLinear().backward(spec, (gemm, gemm))
    assert forward is not None
    assert backward is not None
    _, x_1 = forward(x, w, None, seed, True)
    backward(dy, w, x_1, seed)


def _masks() -> Iterator[KernelCall]:
    for dtype in (*DTYPES, torch.bool):
        for count in (1, 1 << 20, codec.WIDE_NUMEL):
            x, part = torch.empty(count, dtype=dtype, device="meta"), "hot" if count == 1 << 20 else "edges"
            bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device="meta")
            for nan in (False, True):
                what = f"mask of {_short(dtype)}"
                yield KernelCall(f"pack {what}", partial(codec.pack_mask, x, 0.0, 1.0, nan), part)
            if dtype is not torch.bool:
                yield KernelCall(f"unpack {what}", partial(codec.unpack_mask, bits, count, dtype), part)
                yield KernelCall(f"apply {what}", partial(codec.apply_mask, bits, x), part)


def _packed(fmt: Format, layout: Layout) -> tuple[Tensor, Tensor]:
    shapes = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
    codes, scales = (torch.empty(sizes, dtype=torch.uint8, device="meta") for sizes in shapes)
    return codes, scales


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _absent_device(target: str) -> SimpleNamespace:
    """As much of a Triton driver as compiling asks for."""
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    number = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 0}
    return SimpleNamespace(get_current_target=lambda: gpu, **number)


#: that was compiled for last
_target: list[str] = []


@contextmanager
def compiling(target: str) -> Iterator[list[Any]]:
    """Inside, a launch of a Triton kernel compiles it for ``target``, adds it to the list and runs nothing."""
    compiled: list[Any] = []
    run = JITFunction.run
    for kernel in vars(codec_kernels).values():
        if isinstance(kernel, JITFunction) and _target != [target]:
            kernel.device_caches.clear()  # by the device's number, whatever the target was
    _target[:] = [target]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    with patch.object(JITFunction, "run", compile_only), patch.object(driver, "_active", _absent_device(target)):
        yield compiled


def read(kernel: Any) -> Record:
    """Measure one compiled kernel: a thread's registers and spilled bytes, a block's shared memory; for NVIDIA's GPUs
    also the bytes of its widest access to global memory."""
    asm = kernel.asm
    figures = _read_amd(asm["amdgcn"]) if "amdgcn" in asm else _read_nvidia(asm)
    return {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, **figures}


def _read_nvidia(asm: Any) -> Record:
    ptx = asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def widest(kind: str) -> int:
        matches = re.findall(rf"\b{kind}\.global[a-z0-9_:.]*?(?:\.v(\d))?\.b(\d+)", ptx)
        return max((int(count or 1) * int(bits) // 8 for count, bits in matches), default=0)

    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "load": widest("ld"),
        "store": widest("st"),
        "flushes": bool(re.search(r"\b(add|sub|mul|fma)\.[a-z.]*ftz", ptx)),
    }


def _read_amd(asm: str) -> Record:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", asm)[0])

    results = {"registers": number("vgpr_count"), "spilled": 4 * number("vgpr_spill_count")}
    return results | {"flushes": ".amdhsa_float_denorm_mode_32 0" in asm}


def compiled_rows(target: str, calls: Iterable[KernelCall]) -> Iterator[Record]:
    """A row for each kernel that is new, and for each launch that fails."""
    seen: set[str] = set()
    for launch in calls:
        row = {"target": target, "launch": launch.what, "hot": launch.part == "hot"}
        with compiling(target) as kernels:
            try:
                launch.call()
            except Exception as error:  # any of the compiler's: a failure is what is looked for
                last = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                yield {**row, "error": last[-1][:200]}
        for kernel in kernels:
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                yield {**row, **read(kernel)}


def faults(rows: Iterable[Record]) -> list[str]:
    """List the faults: kernels that do not compile, do not fit the target or flush, and hot ones that spill."""
    lines = []
    for row in rows:
        launch = f"{row['target']}: {row['launch']}"
        if "error" in row:
            lines.append(f"{launch}: {row['error']}")
        elif row["shared"] > TARGETS[row["target"]]:
            lines.append(f"{launch}: {row['kernel']} takes {row['shared']:,} bytes of shared memory")
        elif row["hot"] and row["spilled"]:
            lines.append(f"{launch}: {row['kernel']} spills {row['spilled']} bytes")
        elif row["flushes"]:
            lines.append(f"{launch}: {row['kernel']} flushes subnormals")
    return lines


def summary(rows: list[Record]) -> list[Any]:
    """A row a kernel and target: how many variants there are, and the most of each figure among them."""
    import pandas as pd

    compiled = pd.DataFrame([{"variants": 1, **row} for row in rows if "error" not in row])
    if compiled.empty:
        return []
    figures = ("registers", "spilled", "shared", "load", "store")
    most = {name: "max" for name in figures if name in compiled}  # of AMD's GPUs the last two are not read
    of_each = compiled.groupby(["kernel", "target"], sort=False).agg({"variants": "sum", **most})
    return list(of_each.reset_index().sort_values("kernel", kind="stable").to_dict("records"))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.gpu.compiled", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this (may be given again)")
    parts = "hot: what a step spends its time in; edges: that too"
    parser.add_argument("--part", choices=PARTS, default="all", help=parts)
    args = parser.parse_args(argv)
    rows: list[Record] = []
    for target in args.target or TARGETS:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            try:
                of_target = process.submit(rows_of, target, args.part).result()
            except BrokenProcessPool as error:  # Triton's compiler may end a process
                of_target = [{"target": target, "launch": "all", "error": str(error)}]
        print(f"{target}: {len(of_target)} kernels, {len(faults(of_target))} faults", file=sys.stderr, flush=True)
        rows += of_target
    errors = faults(rows)
    print(table(summary(rows)), *errors, sep="\n")
    return int(bool(errors))


def rows_of(target: str, part: str) -> list[Record]:
    """The rows of the launches of a part and of those before it."""
    within = (call for call in kernel_calls() if PARTS.index(call.part) <= PARTS.index(part))
    return list(compiled_rows(target, within))


if __name__ == "__main__":
    sys.exit(main())
