"""Compile the GPU kernels for a GPU that is not there, and read what the compiler made of them. Nothing runs.

    python -m analysis.gpu.compile [--out FILE.csv]

launches each kind of kernel on CPU tensors with Triton told to stop after compiling for compute capability 9.0 (H100,
H200), and prints registers and spilled bytes a thread, shared memory a program, machine instructions (of codecs: a
value), the widest load and store of global memory, and how many of the instructions are the tensor cores' products.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsq.command.files import check_writable, write_text
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import as_csv, table
from dsq.formats import BFP, FixedPoint, Format, Layout
from dsq.formats.signed_bfp import SignedBFP
from dsq.formats.signed_nvint import SignedNVInt
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.triton import codec, int8_gemm

PROG = "python -m analysis.gpu.compile"
TARGET = GPUTarget("cuda", 90, 32)
SHAPE = (1024, 512)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel became."""

    kernel: str
    registers: int  #: a thread
    spilled_bytes: int  #: a thread
    shared_bytes: int  #: a program
    instructions: int  #: a thread
    load_bytes: int  #: widest load of global memory
    store_bytes: int  #: widest store to global memory
    barriers: int
    matrix_products: int  #: instructions of the tensor cores (wgmma)
    flushes: bool  #: whether any float32 addition or multiplication flushes subnormals


class _AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Inside, a launch of a Triton kernel compiles it for TARGET, adds it to the list and runs nothing."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton then compiles nothing")
    compiled: list[Compiled] = []
    run, before = JITFunction.run, driver._active

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(_read(kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_AbsentDevice())
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver.set_active(before)


def _read(kernel) -> Compiled:
    usage, sass = _disassemble(kernel.asm["cubin"])
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass, re.MULTILINE)
    code = [name for name in instructions if not name.startswith("NOP")]
    return Compiled(
        kernel=kernel.metadata.name,
        registers=_usage(usage, "REG"),
        spilled_bytes=_usage(usage, "STACK"),
        shared_bytes=kernel.metadata.shared,
        instructions=len(code),
        load_bytes=_widest(code, "LDG"),
        store_bytes=_widest(code, "STG"),
        barriers=sum(name.startswith("BAR") for name in code),
        matrix_products=sum("GMMA" in name for name in code),
        flushes=bool(re.search(r"\b(add|sub|mul|fma)\.[a-z.]*ftz", kernel.asm["ptx"])),
    )


def _usage(report: str, resource: str) -> int:
    found = re.search(rf"{resource}:(\d+)", report)
    assert found is not None, report
    return int(found[1])


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """The report of resources, and the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(tool: str, option: str) -> str:
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

        return run(triton.knobs.nvidia.cuobjdump.path, "-res-usage"), run(triton.knobs.nvidia.nvdisasm.path, "-c")


def _widest(code: list[str], prefix: str) -> int:
    """Bytes of the widest access: LDG.E.128 is 16, LDG.E is 4, LDG.E.U8 is 1."""
    widths = [re.search(r"\.(?:[US])?(8|16|64|128)\b", name) for name in code if name.startswith(prefix)]
    return max((int(width[1]) // 8 if width else 4 for width in widths), default=0)


def launches() -> Iterator[tuple[dict[str, object], int, Callable[[], object]]]:
    """What is launched, the values a thread of it handles, and the call."""
    yield from _codec_launches()
    yield from _product_launches()


def _codec_launches() -> Iterator[tuple[dict[str, object], int, Callable[[], object]]]:
    x = torch.empty(SHAPE)
    for axis, dim in (("columns", -1), ("rows", 0)):
        layout = Layout.of(SHAPE, dim)
        values = codec.TILE["T"] * codec.TILE["C"] // (32 * codec.TILE["num_warps"])
        if dim == 0:
            values = 16 * codec.BOX_TILE["C"] // (32 * codec.BOX_TILE["num_warps"])
        for dtype in (torch.float32, torch.bfloat16):
            for fmt in (*map(BFP, (2, 4, 8, 16)), SignedBFP(4), SignedNVInt(4)):
                row = {"format": fmt, "boxes along": axis, "type": str(dtype).removeprefix("torch.")}
                codes, scales = _packed(fmt, layout)
                typed = x.to(dtype)
                yield {"op": "pack", **row}, values, partial(codec.pack, typed, fmt, layout, None)
                yield {"op": "pack, stochastic", **row}, values, partial(codec.pack, typed, fmt, layout, 1)
                yield {"op": "unpack", **row}, values, partial(codec.unpack, codes, scales, fmt, layout, dtype)
                yield {"op": "quantize", **row}, values, partial(codec.quantize, typed, fmt, layout, None, dtype)


def _product_launches() -> Iterator[tuple[dict[str, object], int, Callable[[], object]]]:
    formats: tuple[Format, ...] = (BFP(4), SignedNVInt(4), FixedPoint(4))
    for fmt in formats:
        for transposed in (False, True):  # of a forward, and of a weight's gradient
            a, b = Operand(fmt, 1 - transposed, transposed), Operand(fmt, 1 - transposed, not transposed)
            x, w = (Codes(*_packed(fmt, Layout.of(SHAPE, operand.axis)), torch.Size(SHAPE)) for operand in (a, b))
            for gemm in int8_gemm.GEMMS:
                row = {"format": fmt, "boxes along": "rows" if transposed else "columns"}
                yield {"op": gemm.name, **row}, 1, partial(gemm.run, MatMul(a, b), x, w, None)


def _packed(fmt: Format, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
    return torch.empty(codes, dtype=torch.uint8), torch.empty(scales, dtype=torch.uint8)


def compile_all(out: str | None) -> None:
    if out:
        check_writable(out)
    rows = []
    with compiling() as compiled:
        for row, values, launch in launches():
            before = len(compiled)
            launch()
            rows += [
                {
                    **row,
                    "kernel": made.kernel,
                    "registers": made.registers,
                    "spilled": made.spilled_bytes,
                    "shared": made.shared_bytes,
                    "instructions": round(made.instructions / values, 1),
                    "load bytes": made.load_bytes,
                    "store bytes": made.store_bytes,
                    "barriers": made.barriers,
                    "matrix products": made.matrix_products,
                    "flushes": made.flushes,
                }
                for made in compiled[before:]
            ]
    print("Compiled for compute capability 9.0, not run on a GPU")
    print(table(rows))
    if out:
        write_text(out, as_csv(rows))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="FILE", help="write the table to this CSV file too")
    args = parser.parse_args(argv)
    return guarded(PROG, lambda: compile_all(args.out))


if __name__ == "__main__":
    sys.exit(main())
