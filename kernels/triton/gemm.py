"""The ways to multiply on a GPU's tensor cores: in bfloat16, by PyTorch, with exact products and sums in float32.

A value of at most 8 significant bits is exact there; one of 9 to 16 bits in a (the gradient at a wide q3) is the sum of
two such parts, which makes two products. Integer and fp8 units gain nothing on an H100 (docs/gpu.md).

Shape suffixes: M rows, N columns, K the contraction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsq.formats import Format
from dsq.kernels.backend import DTYPES, GemmKernel, MatMul
from dsq.kernels.reference.backend import TORCH

Fits = Callable[[Format | None], bool]


def _exact(a: Fits, b: Fits, dtypes: tuple[torch.dtype, ...]) -> Callable[[MatMul, torch.dtype], bool]:
    """Return a test of whether a product is exact: the formats of both operands must fit."""

    def fits(matmul: MatMul, dtype: torch.dtype) -> bool:
        is_exact = matmul.exact and dtype in dtypes and a(matmul.a.format) and b(matmul.b.format)
        return is_exact and torch.cuda.is_bf16_supported(including_emulation=False)

    return fits


def _narrow(fmt: Format | None) -> bool:
    return fmt is not None and fmt.exact_in_bfloat16


def _two_parts(fmt: Format | None) -> bool:
    """Return whether the significand is that of two bfloat16 values: each holds 8 bits, the second one signed."""
    return fmt is not None and fmt.significand_bits <= 15


def matmul_bf16(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    product = torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return product if bias_N is None else product.add_(bias_N)


def _in_parts(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    high, low = split(a_MK)
    return matmul_bf16(matmul, high, b_KN, bias_N) + matmul_bf16(matmul, low, b_KN, None)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bfloat16 tensors whose sum is ``x`` of 15 significant bits: each part holds 8."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


_BF16 = torch.bfloat16
GEMMS = (
    GemmKernel("bfloat16", _exact(_narrow, _narrow, DTYPES), matmul_bf16, a_dtype=_BF16, b_dtype=_BF16),
    GemmKernel("split", _exact(_two_parts, _narrow, DTYPES[:1]), _in_parts, b_dtype=_BF16),
    TORCH,
)
