"""The fastest of the GEMMs that fit a product on this CPU, measured once for each machine, build and class of sizes.

The time of a GEMM includes the preparation of its operands: quantized to values, or packed. Sizes are rounded up to one
of four steps per octave (4, 5, 6, 7, 8, 10 and so on). For a product of over MEASURED multiply-accumulates a smaller
one is measured, and its times are scaled: of the preparation by the operands' values, of the product by its
multiply-accumulates. The choice is saved in a file, so that a resumed run multiplies as the first did:

    $DSQ_CACHE or $XDG_CACHE_HOME/dsq or ~/.cache/dsq, gemms.jsonl

A choice is a line that is appended, and the first line of a product counts, so concurrent processes choose the same.

With DSQ_GEMM=NAME in the environment nothing is measured: the kernel of that name is chosen if it fits, else the first
that fits.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsq.command import open_regular, processor, read_bytes
from dsq.formats import Layout
from dsq.kernels.backend import Backend, Codes, GemmKernel, MatMul, Operand, Sizes
from dsq.kernels.reference.backend import REFERENCE

#: multiply-accumulates of the largest product that is timed: about 6 ms of a core in float32. The operands of a quarter
#: of it would fit the second-level cache, where kernels are equally fast that differ by half on larger products
MEASURED = 1 << 28
#: multiply-accumulates below which the first kernel that fits is chosen. The overhead of so small a product costs more
#: than the product, and a layer whose products are all compiled is one call
TIMED_FROM = 1 << 18
#: the least number of rounds in which every kernel is timed once; the best time counts
ROUNDS = 5
#: the least seconds of all rounds. Five rounds of a product of 0.3 ms, on two threads of a shared machine, once chose a
#: kernel that was a third slower than the best
SECONDS = 0.03
#: a kernel further down a backend's list is chosen if its time is below this fraction of the time of those before it
MARGIN = 0.95

#: the largest file of choices in bytes, over 10,000 choices. A larger or not a regular file is ignored
MAX_BYTES = 4 * 2**20


def fastest(
    gemms: Sequence[GemmKernel], matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend
) -> GemmKernel:
    """Return the kernel to multiply with, from ``gemms``, which all fit ``matmul`` and are in order of preference."""
    forced_name = os.environ.get("DSQ_GEMM")
    if forced_name or len(gemms) == 1 or math.prod(sizes) < TIMED_FROM:
        return next((gemm for gemm in gemms if gemm.name == forced_name), gemms[0])
    shape = size_class(sizes)
    names = " ".join(gemm.name for gemm in gemms)  # a release may add one
    build = f"{backend.name} {backend.build}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    key = f"{processor()}, {build}; {_text(matmul)}; {'x'.join(map(str, shape))}; of {names}"
    if dtype is not torch.float32:
        key += f"; {dtype}"
    if (precision := torch.get_float32_matmul_precision()) != "highest":  # PyTorch's own products may take TF32
        key += f"; {precision} precision of float32"
    choice = _saved_choice(gemms, key)
    if choice is None:
        measured = preferred(gemms, timed(gemms, matmul, dtype, sizes, backend))
        _save_choice(key, measured.name)
        choice = _saved_choice(gemms, key) or measured
    return choice


def preferred(gemms: Sequence[GemmKernel], seconds: Sequence[float]) -> GemmKernel:
    """Return the fastest kernel, or an earlier one if the gain over it is within MARGIN."""
    index = 0
    for later, time_of_later in enumerate(seconds):
        if time_of_later < MARGIN * seconds[index]:
            index = later
    return gemms[index]


def timed(
    gemms: Sequence[GemmKernel], matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend
) -> list[float]:
    """Return the best time of each kernel for ``sizes`` in seconds, in turns for ROUNDS and SECONDS, on random operands
    of their class."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, depth = shape = size_class(sizes)
    values_ratio, products_ratio = _values(sizes) / _values(shape), math.prod(sizes) / math.prod(shape)
    shapes = (rows, depth), (depth, columns)
    values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    stored = (x.t() if operand.transposed else x for x, operand in zip(values, (matmul.a, matmul.b), strict=True))
    a, b = (x.contiguous() for x in stored)
    preparing, multiplying = ([float("inf")] * len(gemms) for _ in range(2))
    # of one thread its own time, which what else runs on the machine does not stretch
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = time.perf_counter()
    rounds = 0
    while rounds < ROUNDS or time.perf_counter() - begin < SECONDS:
        rounds += 1
        for i, gemm in enumerate(gemms):
            start = clock()
            operands = operands_for(gemm, matmul, a, b, backend)
            ready = clock()
            gemm.run(matmul, *operands, None)
            preparing[i], multiplying[i] = min(preparing[i], ready - start), min(multiplying[i], clock() - ready)
    return [values_ratio * p + products_ratio * m for p, m in zip(preparing, multiplying, strict=True)]


def _values(sizes: Sizes) -> int:
    """Return the number of values of both operands."""
    rows, columns, depth = sizes
    return (rows + columns) * depth


def size_class(sizes: Sizes) -> Sizes:
    """Return ``sizes`` rounded up to three significant bits, the largest halved until the product is at most
    MEASURED."""
    steps = (1 << max((size - 1).bit_length() - 3, 0) for size in sizes)
    rounded = [-(-size // step) * step for size, step in zip(sizes, steps, strict=True)]
    while math.prod(rounded) > MEASURED:
        rounded[rounded.index(max(rounded))] //= 2
    rows, columns, depth = rounded
    return rows, columns, depth


def operands_for(gemm: GemmKernel, matmul: MatMul, a: Tensor, b: Tensor, backend: Backend) -> tuple[Any, Any]:
    """Return ``a`` and ``b`` quantized by ``backend``, or by the reference, in the form that ``gemm`` takes."""

    def prepare(x: Tensor, operand: Operand, dtype: torch.dtype | None) -> Any:
        fmt = operand.format
        values = x
        if fmt is not None:
            layout = Layout.of(x.shape, operand.axis)
            codec = backend if backend.serves(fmt) else REFERENCE
            if gemm.packed:
                codes = Codes(*codec.pack(x, fmt, layout, None), x.shape)
                return codes if gemm.convert is None else gemm.convert(operand, codes)
            values = codec.quantize(x, fmt, layout, None, dtype or x.dtype)
        return values.t() if operand.transposed else values

    return prepare(a, matmul.a, gemm.a_dtype), prepare(b, matmul.b, gemm.b_dtype)


def _text(matmul: MatMul) -> str:
    operands = " by ".join(f"{x.format} axis {x.axis}{' transposed' * x.transposed}" for x in (matmul.a, matmul.b))
    return operands if matmul.exact else f"{operands} in float32"  # fits other kernels


def _file() -> Path:
    """Return the file of choices. Raises RuntimeError if the user has no home."""
    if dsq_cache := os.environ.get("DSQ_CACHE"):
        return Path(dsq_cache) / "gemms.jsonl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsq" / "gemms.jsonl"


def _saved_choice(gemms: Sequence[GemmKernel], key: str) -> GemmKernel | None:
    """Return the choice in the file; None if it has none, or cannot be read."""
    lines: list[bytes] = []
    with suppress(OSError, RuntimeError, ValueError):
        lines = read_bytes(_file(), MAX_BYTES).splitlines()
    choices = {_line(key, gemm.name).encode(): gemm for gemm in gemms}
    return next((choices[line] for line in lines if line in choices), None)


def _save_choice(key: str, name: str) -> None:
    """Append a choice to the file. If the file cannot be written, the next process measures again."""
    with suppress(OSError, RuntimeError, ValueError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with open(open_regular(_file(), flags), "a", encoding="utf-8") as file:
            if file.tell() < MAX_BYTES:
                file.write(f"\n{_line(key, name)}\n")  # a killed process may have left a line unfinished


def _line(key: str, name: str) -> str:
    return json.dumps([key, name])
