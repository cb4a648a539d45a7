"""Which of the GEMMs that fit a product is the fastest on this CPU: measured once for a machine and a class of sizes.

A GEMM is timed with what it needs before it can multiply: operands quantized to values, or packed. Sizes count as the
next of four to an octave (4, 5, 6, 7, 8, 10 and so on), and beyond MEASURED multiply-accumulates a smaller product
stands for a larger one. The choice is kept in a file, so that a resumed run multiplies as the first did:

    $DSQ_CACHE or $XDG_CACHE_HOME/dsq or ~/.cache/dsq, gemms.jsonl

A choice is a line that is added, and the first of a product counts: processes that measure at once take the same.

DSQ_GEMM=NAME in the environment takes the kernel of that name wherever it fits, else the first that fits, and measures
nothing.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dsq.command import open_regular, processor, read_bytes
from dsq.formats import Layout
from dsq.kernels.backend import Backend, Codes, GemmKernel, MatMul, Operand, Sizes
from dsq.kernels.reference.backend import REFERENCE

#: multiply-accumulates of the largest product that is timed: about 6 ms of a core in float32. A quarter of it lies in
#: the second-level cache, where kernels are alike that differ by half on larger products
MEASURED = 1 << 28
#: multiply-accumulates below which the first that fits is taken: what surrounds so small a product costs more than it,
#: and a layer all of whose products are compiled is one call
TIMED_FROM = 1 << 18
#: rounds in which every kernel is timed once, at least; the best time counts
ROUNDS = 5
#: seconds that the rounds take, at least: five of a product of 0.3 ms, on two threads of a shared machine, once took a
#: kernel that was a third slower than the best
SECONDS = 0.03
#: a kernel further down a backend's list has to be faster than those before it by this factor
MARGIN = 0.95

#: bytes of the file of choices, over 10,000 of them: a larger one, or what is no regular file, is done without
MAX_BYTES = 4 * 2**20


def fastest(
    gemms: Sequence[GemmKernel], matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend
) -> GemmKernel:
    """The kernel to multiply with, of ``gemms``, which all fit ``matmul`` and stand in the order of preference."""
    wanted = os.environ.get("DSQ_GEMM")
    if wanted or len(gemms) == 1 or math.prod(sizes) < TIMED_FROM:
        return next((gemm for gemm in gemms if gemm.name == wanted), gemms[0])
    shape = size_class(sizes)
    names = " ".join(gemm.name for gemm in gemms)  # a release may bring another
    key = f"{_machine(backend)}; {_text(matmul)}; {'x'.join(map(str, shape))}; of {names}"
    if dtype is not torch.float32:
        key += f"; {dtype}"
    if (precision := torch.get_float32_matmul_precision()) != "highest":  # PyTorch's own products may take TF32
        key += f"; {precision} precision of float32"
    known = _known(gemms, key)
    if known is None:
        best = preferred(gemms, timed(gemms, matmul, dtype, shape, backend))
        _keep(key, best.name)
        known = _known(gemms, key) or best
    return known


def preferred(gemms: Sequence[GemmKernel], seconds: Sequence[float]) -> GemmKernel:
    """The fastest, but the earliest where a later one does not gain more than noise may."""
    best = 0
    for later, taken in enumerate(seconds):
        if taken < MARGIN * seconds[best]:
            best = later
    return gemms[best]


def timed(
    gemms: Sequence[GemmKernel], matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend
) -> list[float]:
    """The best time of each kernel, in turns for ROUNDS and SECONDS, on random operands of ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, depth = sizes
    shapes = (rows, depth), (depth, columns)
    values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    stored = (x.t() if operand.transposed else x for x, operand in zip(values, (matmul.a, matmul.b), strict=True))
    a, b = (x.contiguous() for x in stored)
    best = [float("inf")] * len(gemms)
    began, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - began < SECONDS:
        rounds += 1
        for i, gemm in enumerate(gemms):
            start = time.perf_counter()
            gemm.run(matmul, *prepared(gemm, matmul, a, b, backend), None)
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def size_class(sizes: Sizes) -> Sizes:
    """``sizes`` rounded up to three bits, the largest halved until the product is one that is timed."""
    steps = (1 << max((size - 1).bit_length() - 3, 0) for size in sizes)
    rounded = [-(-size // step) * step for size, step in zip(sizes, steps, strict=True)]
    while math.prod(rounded) > MEASURED:
        rounded[rounded.index(max(rounded))] //= 2
    rows, columns, depth = rounded
    return rows, columns, depth


def prepared(
    gemm: GemmKernel, matmul: MatMul, a: Tensor, b: Tensor, backend: Backend
) -> tuple[Tensor | Codes, Tensor | Codes]:
    """``a`` and ``b`` quantized by ``backend``, or by the reference, as ``gemm`` takes them: values, or packed."""

    def one(x: Tensor, operand: Operand, dtype: torch.dtype | None) -> Tensor | Codes:
        fmt, layout, values = operand.format, Layout.of(x.shape, operand.axis), x
        if fmt is not None:
            codec = backend if backend.serves(fmt) else REFERENCE
            if gemm.packed:
                return Codes(*codec.pack(x, fmt, layout, None), x.shape)
            values = codec.quantize(x, fmt, layout, None, dtype or x.dtype)
        return values.t() if operand.transposed else values

    return one(a, matmul.a, gemm.a_dtype), one(b, matmul.b, gemm.b_dtype)


def _text(matmul: MatMul) -> str:
    operands = " by ".join(f"{x.format} axis {x.axis}{' transposed' * x.transposed}" for x in (matmul.a, matmul.b))
    return operands if matmul.exact else f"{operands} in float32"  # other kernels fit it


def _machine(backend: Backend) -> str:
    return f"{processor()}, {backend.name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _file() -> Path:
    """Raises RuntimeError where the user has no home."""
    if ours := os.environ.get("DSQ_CACHE"):
        return Path(ours) / "gemms.jsonl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsq" / "gemms.jsonl"


def _known(gemms: Sequence[GemmKernel], key: str) -> GemmKernel | None:
    """The choice in the file; None where there is none that can be read."""
    lines: list[bytes] = []
    with suppress(OSError, RuntimeError, ValueError):
        lines = read_bytes(_file(), MAX_BYTES).splitlines()
    choices = {_line(key, gemm.name).encode(): gemm for gemm in gemms}
    return next((choices[line] for line in lines if line in choices), None)


def _keep(key: str, name: str) -> None:
    """Enter a choice into the file; where it cannot be written, it is measured again by the next process."""
    with suppress(OSError, RuntimeError, ValueError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with open(open_regular(_file(), flags), "a", encoding="utf-8") as file:
            if file.tell() < MAX_BYTES:
                file.write(f"\n{_line(key, name)}\n")  # not behind one that a killed process did not finish


def _line(key: str, name: str) -> str:
    return json.dumps([key, name])
