"""Codes between a low and a step of each group by the backend of the tensor. For what saved-tensor hooks keep, which no
compiler sees: no operators. kernels/reference/affine.py has the equations.
"""

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups, Running
from dsq.kernels.dispatch import backend_of, check_types


def affine_pack(
    x: Tensor, bits: int, groups: Groups, running: Running | None = None, seed: int | None = None
) -> AffineCodes:
    """Codes of 1 to 8 bits of ``x`` (of FLOATS, any shape), in running ranges, which are moved by the values first, in
    place; None: each group is one run, in its own range. Ranges are float32, or float64 for float64 values.
    """
    check_types(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:  # of no group, perhaps
        return AffineCodes(x.new_empty(0, dtype=torch.uint8), x.new_zeros(2, groups.number, dtype=wide))
    _check_groups(bits, groups)
    if running is not None:
        ranges = running.alpha_beta
        _check_ranges(ranges, groups)
        if ranges.dtype != wide or ranges.device != x.device or not ranges.is_contiguous():
            raise ValueError(
                f"running ranges must be contiguous {wide} on {x.device}, got {ranges.dtype} on {ranges.device}"
            )
    elif groups.number != -(-x.numel() // groups.run):
        raise ValueError(f"each of the {groups.number} groups must be one run of {groups.run} of {x.numel()} values")
    x = (x.detach() if x.requires_grad else x).contiguous()
    return backend_of(x).affine_pack(x, bits, groups, running, seed)


def affine_unpack(packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
    """The ``count`` values, (count,)."""
    check_types(dtype)
    codes, ranges = packed
    if count == 0:
        return codes.new_empty(0, dtype=dtype)
    _check_groups(bits, groups)
    _check_ranges(ranges, groups)
    if codes.shape != ((count * bits + 7) // 8,) or codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8 ({(count * bits + 7) // 8},), got {codes.dtype} {tuple(codes.shape)}")
    contiguous = AffineCodes(codes.contiguous(), ranges.contiguous())
    return backend_of(codes, ranges).affine_unpack(contiguous, bits, groups, count, dtype)


def _check_groups(bits: int, groups: Groups) -> None:
    if not 1 <= bits <= 8 or groups.run < 1 or groups.number < 1:
        raise ValueError(f"bits must be 1 to 8, and runs and groups at least 1, got {bits} and {groups}")


def _check_ranges(ranges: Tensor, groups: Groups) -> None:
    if ranges.shape != (2, groups.number):
        raise ValueError(f"ranges must have the shape (2, {groups.number}), got {tuple(ranges.shape)}")
