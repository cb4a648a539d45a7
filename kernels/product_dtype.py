"""Products of bfloat16 on x86 CPUs without instructions for them.

There PyTorch's loops take 4 (the gradients of a convolution) to 60 times (a product of matrices) as long as float32's
products of the same values (AVX2, PyTorch 2.13). Both sum in float32, so dsq multiplies in float32 and rounds the
result: the same numbers up to the order of sums. While it does, operands and result take twice their memory more.
"""

from functools import cache
from platform import machine

import torch


@cache
def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype in which to multiply values of ``dtype``: float32 where the CPU has no instructions for it."""
    return torch.float32 if device_type == "cpu" and dtype is torch.bfloat16 and _emulates_bfloat16() else dtype


def _emulates_bfloat16() -> bool:
    """Return whether this is an x86 CPU on which oneDNN has no products of bfloat16; others were not measured."""
    on_x86 = machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    return on_x86 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
