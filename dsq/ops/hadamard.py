"""Hadamard transforms along an axis: both operands of a product take one, and the product stays what it was.

The axis is cut into runs of ``size`` values, and the rest into shorter powers of two, so that no value is added. Each
run is multiplied by the orthogonal Hadamard matrix of its length, its values by random signs before if it has some.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsq.kernels.dispatch import define, may_bypass_dispatcher, signed
from dsq.kernels.reference.codec import uniform
from dsq.ops.seeds import SeedOffset


def transform(x: Tensor, axis: int, size: int, seed: int | None) -> Tensor:
    """Return the transform of ``x`` in float32 (float64 stays), runs of ``size``, a power of two, along ``axis``.

    ``seed``: of random signs; None: the values keep theirs. Compilers and counters of FLOPs see one operator.
    """
    if may_bypass_dispatcher(x):
        return _transform(x, axis, size, seed)
    result: Tensor = torch.ops.dsq.hadamard(x, axis, size, signed(seed))
    return result


def _transform(x: Tensor, axis: int, size: int, seed: int | None) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    axis %= x.dim()
    outer, length, inner = x.shape[:axis].numel(), x.shape[axis], x.shape[axis + 1 :].numel()
    if not x.numel():
        return torch.empty_like(x)
    if seed is not None:
        signs = uniform(1, length, seed + SeedOffset.SIGNS, x.device)[0].round().mul(2).sub(1)
        x = x * signs.to(x.dtype).view(-1, *[1] * (x.dim() - 1 - axis))
    flat = x.reshape(outer, length, inner)
    results, begin = [], 0
    while begin < length:
        size = min(size, 1 << ((length - begin).bit_length() - 1))
        end = length - (length - begin) % size
        h = matrix(size, x.dtype, x.device)
        runs = flat[:, begin:end].reshape(outer * (end - begin) // size, size, inner)
        # the matrix is its own transpose; one product of all rows takes a third of the time of one a run
        with torch._C._DisableAutocast():  # which would round the values
            result = (runs[..., 0] @ h)[..., None] if inner == 1 else h @ runs
        results.append(result.view(outer, end - begin, inner))
        begin = end
    return (torch.cat(results, 1) if len(results) != 1 else results[0]).view(x.shape)


@lru_cache(maxsize=64)
def matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix of ``size``, a power of two, divided by its square root."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / math.sqrt(size)).to(dtype).to(device)


define(
    "hadamard(Tensor x, int axis, int size, SymInt? seed) -> Tensor",
    _transform,
    lambda x, axis, size, seed: x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)),
)
register_flop_formula(torch.ops.dsq.hadamard)(lambda x, axis, size, *_, **__: 2 * math.prod(x) * min(size, x[axis]))
