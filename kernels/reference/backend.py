"""The reference as a backend: plain PyTorch on any device, every format, sums in float64.

Shape suffixes: M rows, N columns, K the contraction.
"""

import torch
from torch import Tensor

from dsq.formats import Format, GridFormat, Layout
from dsq.kernels.backend import Backend, GemmKernel, MatMul
from dsq.kernels.reference import codec, grids, stash
from dsq.kernels.reference.formats import SCALINGS


def _in_float64(matmul: MatMul, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    product = a_MK.double() @ b_KN.double()
    return (product if bias_N is None else product + bias_N).to(torch.promote_types(a_MK.dtype, torch.float32))


#: sums in float64, rounded once to float32, unless the operands are float64
FLOAT64 = GemmKernel("float64", lambda *_: True, _in_float64)
#: PyTorch's matmul in the operands' own dtype
TORCH = GemmKernel("torch", lambda *_: True, lambda _, a, b, bias: a @ b if bias is None else torch.addmm(bias, a, b))


def _quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    if isinstance(fmt, GridFormat):
        return grids.quantize(x, fmt, layout, seed, dtype)
    return codec.quantize(x, fmt, layout, seed, dtype)


def _pack(x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    return grids.pack(x, fmt, layout, seed) if isinstance(fmt, GridFormat) else codec.pack(x, fmt, layout, seed)


def _unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    if isinstance(fmt, GridFormat):
        return grids.unpack(codes, scales, fmt, layout, dtype)
    return codec.unpack(codes, scales, fmt, layout, dtype)


REFERENCE = Backend(
    name="reference",
    formats=frozenset(SCALINGS),
    quantize=_quantize,
    pack=_pack,
    unpack=_unpack,
    pack_mask=stash.pack_mask,
    unpack_mask=stash.unpack_mask,
    apply_mask=stash.apply_mask,
    affine_pack=stash.affine_pack,
    affine_unpack=stash.affine_unpack,
    gemms=(FLOAT64,),
)
