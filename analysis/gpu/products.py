"""Every way to multiply quantised operands on a GPU, beside PyTorch's float32 and bfloat16 products."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from analysis.gpu.machine import Machine
from analysis.timing import Call
from dsq.command.table import Record
from dsq.formats import BFP, FixedPoint, Format, SignedBFP, SignedNVInt
from dsq.kernels.backend import GemmKernel, MatMul, Operand, Sizes
from dsq.kernels.triton.backend import TRITON
from dsq.kernels.tuning import prepared

#: rows, columns and depth: of a small layer, of a large one, and of a product that fills the GPU
SIZES: tuple[Sizes, ...] = ((1024, 2048, 512), (16384, 4096, 1024), (8192, 8192, 8192))
TINY: tuple[Sizes, ...] = ((32, 64, 48),)
#: formats of a and of b: those of a forward at 4 and at 8 bits, and of a weight's gradient at 16 and 4
FORMATS: tuple[tuple[Format, Format], ...] = (
    *((fmt, fmt) for fmt in (BFP(4), SignedBFP(4), SignedNVInt(4), FixedPoint(4), BFP(4, 128), BFP(8), SignedNVInt(8))),
    (BFP(16), BFP(4)),
)


def multiply(machine: Machine) -> Iterator[Record]:
    """A row a kernel: milliseconds of the product of operands that are ready, and of quantising or packing both too."""
    for rows, columns, depth in SIZES if machine.is_gpu else TINY:
        x, w = (torch.randn(n, depth, device=machine.device) for n in (rows, columns))
        plain = {"float32": partial(torch.mm, x, w.t()), "bfloat16": partial(torch.mm, x.bfloat16(), w.bfloat16().t())}
        milliseconds = machine.milliseconds(plain)
        sizes = f"{rows}x{columns}x{depth}"
        for name, ms in milliseconds.items():
            yield {
                "sizes": sizes,
                "operands": name,
                "kernel": "torch",
                **_figures(ms, milliseconds, rows * columns * depth),
            }
        for a, b in FORMATS:
            matmul = MatMul(Operand(a, 1), Operand(b, 1, transposed=True))
            for gemm in (gemm for gemm in TRITON.gemms if gemm.fits(matmul, torch.float32)):
                calls = _calls(gemm, matmul, x, w)
                taken = machine.milliseconds(calls)
                yield {
                    "sizes": sizes,
                    "operands": f"{a} by {b}",
                    "kernel": gemm.name,
                    **_figures(taken["product"], milliseconds, rows * columns * depth),
                    "with quantising ms": round(taken["all"], 4),
                }


def _figures(ms: float, plain: dict[str, float], products: int) -> Record:
    return {
        "ms": round(ms, 4),
        "over float32": round(ms / plain["float32"], 2),
        "over bfloat16": round(ms / plain["bfloat16"], 2),
        "TFLOP/s": round(2 * products / ms / 1e9, 1),
    }


def _calls(gemm: GemmKernel, matmul: MatMul, x: Tensor, w: Tensor) -> dict[str, Call]:
    operands = partial(prepared, gemm, matmul, x, w, TRITON)
    left, right = operands()
    return {"product": lambda: gemm.run(matmul, left, right, None), "all": lambda: gemm.run(matmul, *operands(), None)}
