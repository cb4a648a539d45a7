"""The Triton kernels compiled for a GPU that is not there, and what the compiler made of them. Nothing runs."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)  #: H100, H200


@dataclass(frozen=True)
class Compiled:
    """What one kernel became."""

    kernel: str
    spilled_bytes: int  #: a thread
    load_bytes: int  #: widest load of global memory
    store_bytes: int  #: widest store to global memory
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
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _printed(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        sass = _printed(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    code = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass, re.MULTILINE)
    return Compiled(
        kernel=kernel.metadata.name,
        spilled_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        load_bytes=_widest(code, "LDG"),
        store_bytes=_widest(code, "STG"),
        matrix_products=sum("GMMA" in name for name in code),
        flushes=bool(re.search(r"\b(add|sub|mul|fma)\.[a-z.]*ftz", kernel.asm["ptx"])),
    )


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _widest(code: list[str], prefix: str) -> int:
    """Bytes of the widest access: LDG.E.128 is 16, LDG.E is 4, LDG.E.U8 is 1."""
    widths = [re.search(r"\.(?:[US])?(8|16|64|128)\b", name) for name in code if name.startswith(prefix)]
    return max((int(width[1]) // 8 if width else 4 for width in widths), default=0)
