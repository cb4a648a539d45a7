"""Codes to and from bitstreams: little-endian, ``bits`` to a code, each row padded to a byte.

Eight codes fill ``bits`` bytes. Shape suffixes: R rows, C columns, G groups of eight codes, B bytes of a group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_with_zeros


def pack(codes_RC: Tensor, bits: int) -> Tensor:
    """The low ``bits`` of codes (R, C), integers of any dtype that holds them, as bytes (R, ceil(C * bits / 8))."""
    rows, columns = codes_RC.shape
    groups = -(-columns // 8)
    codes_RG8 = pad_with_zeros(codes_RC, (0, groups * 8 - columns)).view(rows, groups, 8) & ((1 << bits) - 1)
    packed_RGB = codes_RG8.new_zeros(rows, groups, bits)
    for code, byte, left in _overlaps(bits):
        packed_RGB[..., byte].bitwise_or_(_shifted(codes_RG8[..., code], left))
    packed_R = (packed_RGB & 0xFF).to(torch.uint8).view(rows, groups * bits)
    return packed_R[:, : -(-columns * bits // 8)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes (R, columns) of such bytes, two's complement, int64."""
    sign = 1 << (bits - 1)
    return (unpack_unsigned(packed.long(), bits, columns) ^ sign) - sign


def unpack_unsigned(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes as numbers from 0, in the dtype of ``packed``, which must hold them."""
    rows, groups = packed.shape[0], -(-columns // 8)
    packed_RGB = pad_with_zeros(packed, (0, groups * bits - packed.shape[1])).view(rows, groups, bits)
    codes_RG8 = packed.new_zeros(rows, groups, 8)
    for code, byte, left in _overlaps(bits):
        codes_RG8[..., code].bitwise_or_(_shifted(packed_RGB[..., byte], -left))
    return codes_RG8.view(rows, groups * 8)[:, :columns] & ((1 << bits) - 1)


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Each code and byte of a group that share bits, and how far left the code is shifted to lie in the byte."""
    for code in range(8):
        for byte in range(bits):
            left = code * bits - byte * 8
            if -bits < left < 8:
                yield code, byte, left


def _shifted(x: Tensor, left: int) -> Tensor:
    return x << left if left >= 0 else x >> -left
