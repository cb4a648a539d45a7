"""Which units a GEMM of quantised operands runs on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.formats import Format


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product, with the dtype its operands come in."""

    operands: torch.dtype

    @staticmethod
    def of(x: Tensor, a: Format, b: Format) -> "Gemm":
        """The product of an ``a`` and a ``b`` that stand for tensors like ``x`` (its dtype, its device)."""
        return Gemm(x.dtype)

    def dtype(self, fmt: Format) -> torch.dtype:
        """What an operand of ``fmt`` is to be emitted in."""
        return self.operands

    def __call__(self, a_MK: Tensor, b_KN: Tensor, bias: Tensor | None = None) -> Tensor:
        return a_MK @ b_KN if bias is None else torch.addmm(bias, a_MK, b_KN)
