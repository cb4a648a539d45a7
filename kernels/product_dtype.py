"""Products of bfloat16 and float16 on CPUs without instructions for them.

There PyTorch's loops take 4 (the gradients of a convolution) to 60 times (a product of matrices) as long as float32's
products of the same values (AVX2, PyTorch 2.13). Both sum in float32, so dsq multiplies in float32 and rounds the
result: the same numbers up to the order of sums.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor


@cache
def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype in which to multiply values of ``dtype``: float32 where the CPU has no instructions for it."""
    emulated = device_type == "cpu" and dtype in _SUPPORTED and not _SUPPORTED[dtype]()
    return torch.float32 if emulated else dtype


def _on_mkldnn(name: str) -> bool:
    """Return what oneDNN says of this CPU; True without oneDNN, where nothing was measured."""
    return not torch.backends.mkldnn.is_available() or bool(getattr(torch.ops.mkldnn, name)())


_SUPPORTED = {
    torch.bfloat16: partial(_on_mkldnn, "_is_mkldnn_bf16_supported"),
    torch.float16: partial(_on_mkldnn, "_is_mkldnn_fp16_supported"),
}


def operand_cast(source: torch.dtype, dtype: torch.dtype, device_type: str) -> Callable[[Tensor], Tensor]:
    """Return what makes an operand of ``dtype``, in its ``product_dtype``, of values of ``source``."""
    inner = product_dtype(dtype, device_type)
    if inner is not dtype:
        return lambda x: x.to(dtype).to(inner)
    if source is dtype:
        return lambda x: x  # a call that casts nothing takes as long as ten of Python's
    return lambda x: x.to(dtype)
