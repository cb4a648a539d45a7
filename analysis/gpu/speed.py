"""How near the GPU kernels come to their ceilings: a copy of the same bytes; PyTorch's products of the same sizes."""

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from analysis.gpu import Machine, Trial
from analysis.timing import Call
from dsq.command import Record
from dsq.formats import BFP, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.backend import GemmKernel, MatMul, Sizes, along_contraction
from dsq.kernels.triton import codec
from dsq.kernels.triton.backend import TRITON
from dsq.kernels.tuning import operands_for

#: of a tensor: 512 MiB of float32, many times any cache
ROWS, COLUMNS = 1 << 15, 4096
PACKED = (*map(BFP, (4, 8)), *map(SignedNVInt, (2, 4)), BFP(2), BFP(16))
QUANTIZED = (BFP(4), SignedNVInt(4))


def bandwidth(machine: Machine) -> Iterator[Trial]:
    """A row a kernel: its time, the time of a copy that moves the same bytes, and the share of the copy's bandwidth."""
    rows, columns = (ROWS, COLUMNS) if machine.is_gpu else (16, 128)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, device=machine.device).to(dtype)
        for dim in (-1, 0):
            for fmt in PACKED:
                yield from (_codec(machine, op, x, dim, fmt) for op in ("pack", "unpack"))
            for fmt in QUANTIZED:
                yield _codec(machine, "pack", x, dim, fmt, seed=1)
                yield _codec(machine, "quantize to bfloat16", x, dim, fmt)
            for fmt in (BFP(5), SignedNVInt(6), BFP(4, 128)):
                yield from (_codec(machine, op, x, dim, fmt) for op in ("pack", "unpack"))
        yield _codec(machine, "pack", x, -1, FixedPoint(4))
        yield from _masks(machine, x.view(-1))


def _timed(machine: Machine, moved: int, call: Call) -> Record:
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=machine.device) for _ in range(2))
    source.random_(0, 256)
    durations = machine.device_milliseconds({"kernel": call, "copy": partial(target.copy_, source)})
    return {
        "MB moved": round(moved / 1e6),
        "us": round(1000 * durations["kernel"], 1),
        "copy us": round(1000 * durations["copy"], 1),
        "share of copy": round(durations["copy"] / durations["kernel"], 3),
        "GB/s": round(moved / durations["kernel"] / 1e6),
    }


def _name(op: str, x: Tensor, what: object, dim: int = -1) -> str:
    return f"{op} {str(x.dtype).removeprefix('torch.')} {what} along {'rows' if dim == 0 else 'columns'}"


def _codec(machine: Machine, op: str, x: Tensor, dim: int, fmt: Format, seed: int | None = None) -> Trial:
    """Pack, unpack or quantize. What is read is read twice if the tensor has an exponent."""
    layout = Layout.of(x.shape, dim)
    read = (2 if fmt.block_size == 0 or fmt.tensor_bytes else 1) * x.nbytes
    packed = fmt.nbytes(layout)

    def row() -> Record:
        if op == "pack":
            return _timed(machine, read + packed, partial(codec.pack, x, fmt, layout, seed))
        if op == "unpack":
            codes = codec.pack(x, fmt, layout, None)
            return _timed(machine, x.nbytes + packed, partial(codec.unpack, *codes, fmt, layout, x.dtype))
        call = partial(codec.quantize, x, fmt, layout, None, torch.bfloat16)
        return _timed(machine, read + 2 * x.numel(), call)

    return Trial(_name(op, x, fmt, dim) + ("" if seed is None else ", stochastic"), row)


def _masks(machine: Machine, x: Tensor) -> Iterator[Trial]:
    moved = x.nbytes + x.numel() // 8

    def row(more: int, call: Callable[[Tensor], object]) -> Record:
        bits = codec.pack_mask(x, 0.0, math.nan, True)
        return _timed(machine, moved + more, lambda: call(bits))

    for op, more, call in (
        ("pack", 0, lambda bits: codec.pack_mask(x, 0.0, math.nan, True)),
        ("unpack", 0, lambda bits: codec.unpack_mask(bits, x.numel(), x.dtype)),
        ("apply", x.nbytes, lambda bits: codec.apply_mask(bits, x)),
    ):
        yield Trial(_name(op, x, "mask"), partial(row, more, call))


#: rows, columns and depth: of a large layer, of a product that fills the GPU, of a small layer
SIZES: tuple[Sizes, ...] = ((16384, 4096, 1024), (8192, 8192, 8192), (1024, 2048, 512))
TINY: tuple[Sizes, ...] = ((32, 64, 48),)
#: formats of a and of b: those of a forward at 4 and at 8 bits, and of a weight's gradient at 16 and 4
OPERANDS: tuple[tuple[Format, Format], ...] = (
    (SignedNVInt(4), SignedNVInt(4)),
    (BFP(8), BFP(8)),
    (BFP(16), BFP(4)),
)


def multiply(machine: Machine) -> Iterator[Trial]:
    """A row a kernel: milliseconds of a product of ready operands, and with quantizing or packing both; PyTorch's in
    float32, bfloat16 and fp8, and torchao's int8 if it is installed, beside them."""
    for rows, columns, depth in SIZES if machine.is_gpu else TINY:
        sizes = f"{rows}x{columns}x{depth}"
        x, w = (torch.randn(n, depth, device=machine.device) for n in (rows, columns))
        plain: dict[str, Call] = {
            "float32": partial(torch.mm, x, w.t()),
            "bfloat16": partial(torch.mm, x.bfloat16(), w.bfloat16().t()),
        }
        if machine.is_gpu:
            plain |= _others(x, w)
        for name, call in plain.items():
            yield Trial(f"{sizes} {name}, torch", partial(_product, machine, {"product": call}, rows * columns * depth))
        for a, b in OPERANDS:
            matmul = along_contraction(a, b)
            for gemm in (gemm for gemm in TRITON.gemms if gemm.fits(matmul, torch.float32)):
                row = partial(_ours, machine, gemm, matmul, x, w)
                yield Trial(f"{sizes} {a} by {b}, {gemm.name}", row)


def _others(x: Tensor, w: Tensor) -> dict[str, Call]:
    results: dict[str, Call] = {}
    if torch.cuda.get_device_capability() >= (8, 9):
        one, (a, b) = torch.ones((), device=x.device), (t.to(torch.float8_e4m3fn) for t in (x, w))
        results["fp8"] = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    if importlib.util.find_spec("torchao"):
        from torchao.kernel import int_matmul

        i, j = (t.clamp(-1, 1).mul(127).to(torch.int8) for t in (x, w))
        results["torchao int8"] = lambda: int_matmul(i, j.t())
    return results


def _product(machine: Machine, calls: dict[str, Call], products: int) -> Record:
    durations = machine.device_milliseconds(calls)
    row = {"ms": round(durations["product"], 4), "TFLOP/s": round(2 * products / durations["product"] / 1e9, 1)}
    return row | ({"with quantizing ms": round(durations["all"], 4)} if "all" in durations else {})


def _ours(machine: Machine, gemm: GemmKernel, matmul: MatMul, x: Tensor, w: Tensor) -> Record:
    operands = partial(operands_for, gemm, matmul, x, w, TRITON)
    left, right = operands()
    calls: dict[str, Call] = {
        "product": lambda: gemm.run(matmul, left, right, None),
        "all": lambda: gemm.run(matmul, *operands(), None),
    }
    return _product(machine, calls, x.shape[0] * w.shape[0] * x.shape[1])
