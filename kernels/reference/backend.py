"""The reference as a backend: plain PyTorch on any device, every format, sums in float64.

Shape suffixes: M rows, N columns, K the contraction.
"""

from typing import Any

import torch
from torch import Tensor

from dsq.formats import Format, GridFormat
from dsq.kernels.backend import Backend, GemmKernel, MatMul
from dsq.kernels.product_dtype import product_dtype
from dsq.kernels.reference import codec, grids, stash
from dsq.kernels.reference.formats import SCALINGS


def _in_float64(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    product = a_MK.double() @ b_KN.double()
    return (product if bias_N is None else product + bias_N).to(torch.promote_types(a_MK.dtype, torch.float32))


def _by_pytorch(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    dtype = product_dtype(a_MK.dtype, a_MK.device.type)
    if dtype is a_MK.dtype:
        return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)
    y = _by_pytorch(matmul, a_MK.to(dtype), b_KN.to(dtype), bias_N if bias_N is None else bias_N.to(dtype))
    return y.to(a_MK.dtype)


#: sums in float64, rounded once to float32, unless the operands are float64
FLOAT64 = GemmKernel("float64", lambda *_: True, _in_float64)
#: PyTorch's matmul in the operands' own dtype, or its product dtype
TORCH = GemmKernel("torch", lambda *_: True, _by_pytorch)


def _codec_of(fmt: Format) -> Any:
    return grids if isinstance(fmt, GridFormat) else codec


REFERENCE = Backend(
    name="reference",
    formats=frozenset(SCALINGS),
    quantize=lambda x, fmt, *args: _codec_of(fmt).quantize(x, fmt, *args),
    pack=lambda x, fmt, *args: _codec_of(fmt).pack(x, fmt, *args),
    unpack=lambda codes, scales, fmt, *args: _codec_of(fmt).unpack(codes, scales, fmt, *args),
    pack_mask=stash.pack_mask,
    unpack_mask=stash.unpack_mask,
    apply_mask=stash.apply_mask,
    scale_mask=stash.scale_mask,
    affine_pack=stash.affine_pack,
    affine_unpack=stash.affine_unpack,
    gemms=(FLOAT64,),
)
