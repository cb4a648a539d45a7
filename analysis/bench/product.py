"""One product of matrices, x (M, K) by w (N, K): PyTorch's own against each kernel that multiplies 4-bit operands."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from analysis.timing import Call, Race, race
from dsq.kernels.backend import GemmKernel, MatMul
from dsq.kernels.dispatch import backend_for
from dsq.kernels.tuning import prepared
from dsq.quantizers import Quantizers

#: M, K, N
SIZES = ((1024, 512, 2048), (4096, 1024, 1024))
PRECISION = "[4,4,4,16]"


def races(rounds: int) -> Iterator[Race]:
    """Operands prepared before, and quantised or packed within the call."""
    for rows, depth, columns in SIZES:
        torch.manual_seed(0)
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        title = f"{rows} x {depth} x {columns}, {torch.get_num_threads()} threads"
        yield race(title, ("torch fp32", partial(torch.mm, x, w.t())), _contestants(x, w), rounds)


def _contestants(x: Tensor, w: Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {"torch bf16": partial(torch.mm, x.bfloat16(), w.bfloat16().t())}
    matmul, backend = Quantizers.of(PRECISION).matmuls.output, backend_for(x.device)
    for gemm in backend.gemms:
        if gemm.fits(matmul, x.dtype):
            calls[gemm.name] = partial(gemm.run, matmul, *prepared(gemm, matmul, x, w, backend), None)
            calls[f"{gemm.name}, operands made within"] = partial(_whole, gemm, matmul, x, w)
    return calls


def _whole(gemm: GemmKernel, matmul: MatMul, x: Tensor, w: Tensor) -> Tensor:
    return gemm.run(matmul, *prepared(gemm, matmul, x, w, backend_for(x.device)), None)
