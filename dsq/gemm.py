"""Which units a GEMM of quantised operands runs on: the fastest that hold its products exactly.

Values of at most 9 bits are exact in bfloat16 (8-bit significand, sign apart), so two such operands multiply on its
units with exact products and float32 sums. A wider one, to 16 bits, is exactly the sum of two such parts: two GEMMs.
That pays on a GPU; on a CPU two GEMMs cost as much as one in float32, and the weight gradient, whose boxes both run
along the contraction, multiplies the packed codes instead (kernels.gemm_boxes). Everything else runs in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dsq import kernels
from dsq.config import Units
from dsq.formats import Format


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product ``a b`` (+ bias) with the dtypes that its operands are to come in."""

    a: torch.dtype
    b: torch.dtype
    product: Callable[..., Tensor]

    def __call__(self, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return self.product(a_MK, b_KN, bias_N)


@lru_cache
def gemm(a: Format, b: Format, dtype: torch.dtype, device_type: str, units: Units) -> Gemm:
    """The product of an ``a`` and a ``b`` that stand for tensors of ``dtype`` on ``device_type``."""
    if units == "exact" and dtype == torch.float32 and kernels.has_gemm_bf16(device_type):
        if _fits_bf16(a) and _fits_bf16(b):
            return Gemm(torch.bfloat16, torch.bfloat16, kernels.gemm_bf16)
        if device_type == "cuda" and _fits_bf16(b) and _fits_two_bf16(a):
            return Gemm(torch.float32, torch.bfloat16, _split_a)
        if device_type == "cuda" and _fits_bf16(a) and _fits_two_bf16(b):
            return Gemm(torch.bfloat16, torch.float32, _split_b)
    return Gemm(dtype, dtype, _plain)


def multiplies_packed(a: Format, b: Format, x: Tensor, units: Units) -> bool:
    """Whether a contraction along the boxes of both is best done on their packed codes."""
    narrow = _fits_bf16(a) and _fits_bf16(b)
    exact = units == "exact" and x.dtype == torch.float32 and not narrow
    return exact and kernels.has_gemm_boxes(x.device.type, a.grid, b.grid)


def _fits_bf16(fmt: Format) -> bool:
    return fmt.bits <= 9


def _fits_two_bf16(fmt: Format) -> bool:
    return fmt.bits <= 16


def _plain(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _split_a(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    high, low = _split(a)
    return kernels.gemm_bf16(high, b, bias) + kernels.gemm_bf16(low, b)


def _split_b(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    high, low = _split(b)
    return kernels.gemm_bf16(a, high, bias) + kernels.gemm_bf16(a, low)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum is ``x``: 16 bits are a sign and 15 more, and each part holds 8."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)
