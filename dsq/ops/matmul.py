"""Quantised products, each on the fastest units that hold its products of values exactly.

Values of at most 9 bits are exact in bfloat16 (8-bit significand, sign apart), so two such factors multiply on its
units with exact products and float32 sums. A wider one, to 16 bits, is exactly the sum of two such parts: two GEMMs.
That pays on a GPU; on a CPU two GEMMs cost as much as one in float32. There such products, and all where the CPU has
no bfloat16 units, multiply the packed codes as integers (kernels.gemm_boxes), if boxes run along the contraction.
Everything else runs in float32.
"""

from functools import lru_cache

import torch
from torch import Tensor

from dsq import kernels
from dsq.kernels import Codes, Factor, Product, Way


def multiply(
    product: Product, a: Tensor, b: Tensor | Codes, bias: Tensor | None = None, seed: int | None = None
) -> Tensor:
    """``a b`` (+ bias), with what ``product`` says of both and of the result; in the dtype of ``a``.

    ``seed`` None rounds to nearest; a number rounds stochastically, each tensor with random numbers of its own.
    """
    way = choose(product, a.dtype, a.device.type)
    if way == "codes":
        factors = packed(product.a, a, seed), b if isinstance(b, Codes) else packed(product.b, b, seed)
        result = kernels.gemm_boxes(product, *factors, bias)
    else:
        result = _on_values(product, way, a, b, bias, seed)
    if product.result is None:
        return result
    return kernels.quantize(result, product.result, -1, _plus(seed, product.result_seed))


@lru_cache
def choose(product: Product, dtype: torch.dtype, device_type: str) -> Way:
    """How ``product`` of tensors of ``dtype`` on ``device_type`` is done."""
    a, b = product.a, product.b
    if not product.exact or dtype != torch.float32:
        return "float32"
    if _bits(a) <= 9 and _bits(b) <= 9 and kernels.has_gemm_bf16(device_type):
        return "bfloat16"
    if kernels.has_gemm_boxes(device_type, product):
        return "codes"
    if device_type == "cuda" and max(_bits(a), _bits(b)) <= 16 and kernels.has_gemm_bf16(device_type):
        return "split a" if _bits(b) <= 9 else "split b" if _bits(a) <= 9 else "float32"
    return "float32"


def _bits(factor: Factor) -> int:
    return 32 if factor.grid is None else factor.grid.bits


def packed(factor: Factor, x: Tensor, seed: int | None) -> Codes:
    """``x`` in the bits of ``factor``, which has a grid."""
    assert factor.grid is not None
    return Codes(*kernels.pack(x, factor.grid, factor.dim, _plus(seed, factor.seed)), x.shape)


def _on_values(
    product: Product, way: Way, a: Tensor, b: Tensor | Codes, bias: Tensor | None, seed: int | None
) -> Tensor:
    narrow_a, narrow_b = way in ("bfloat16", "split b"), way in ("bfloat16", "split a")
    left = _quantized(product.a, a, torch.bfloat16 if narrow_a else a.dtype, seed)
    right = _quantized(product.b, b, torch.bfloat16 if narrow_b else a.dtype, seed)
    if way == "bfloat16":
        return kernels.gemm_bf16(left, right, bias)
    if way == "split a":
        high, low = split(left)
        return kernels.gemm_bf16(high, right, bias) + kernels.gemm_bf16(low, right)
    if way == "split b":
        high, low = split(right)
        return kernels.gemm_bf16(left, high, bias) + kernels.gemm_bf16(left, low)
    return left @ right if bias is None else torch.addmm(bias, left, right)


def _quantized(factor: Factor, x: Tensor | Codes, dtype: torch.dtype, seed: int | None) -> Tensor:
    """The factor as it is multiplied."""
    if isinstance(x, Codes):
        assert factor.grid is not None
        values = kernels.unpack(x.codes, x.exponents, factor.grid, x.shape, factor.dim, dtype)
    elif factor.grid is None:
        values = x
    else:
        values = kernels.quantize(x, factor.grid, factor.dim, _plus(seed, factor.seed), dtype)
    return values.t() if factor.transposed else values


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum is ``x``: 16 bits are a sign and 15 more, and each part holds 8."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


def _plus(seed: int | None, offset: int) -> int | None:
    return None if seed is None else seed + offset
