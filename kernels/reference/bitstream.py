"""Codes to and from bitstreams: little-endian, ``bits`` to a code, two's complement, each row padded to a byte."""

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_with_zeros


def pack(codes_RC: Tensor, bits: int) -> Tensor:
    """Codes (R, C), int64, as bytes (R, ceil(C * bits / 8)). Eight codes fill ``bits`` bytes; byte j holds the bits
    [8j, 8j + 8) of the stream."""
    rows, columns = codes_RC.shape
    groups = -(-columns // 8)
    padded = pad_with_zeros(codes_RC, (0, groups * 8 - columns)).view(rows, groups, 8) & ((1 << bits) - 1)
    packed = torch.empty(rows, groups, bits, dtype=torch.uint8, device=codes_RC.device)
    for j in range(bits):
        byte = torch.zeros_like(padded[..., 0])
        for i in range(8):
            shift = i * bits - 8 * j
            if -bits < shift < 8:
                byte |= padded[..., i] << shift if shift >= 0 else padded[..., i] >> -shift
        packed[..., j] = (byte & 0xFF).to(torch.uint8)
    return packed.view(rows, groups * bits)[:, : -(-columns * bits // 8)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes (R, columns), int64, of such bytes."""
    rows = packed.shape[0]
    groups = -(-columns // 8)
    padded = pad_with_zeros(packed, (0, groups * bits - packed.shape[1])).view(rows, groups, bits).long()
    codes = torch.empty(rows, groups, 8, dtype=torch.int64, device=packed.device)
    sign = 1 << (bits - 1)
    for i in range(8):
        code = torch.zeros_like(codes[..., 0])
        for j in range(bits):
            shift = 8 * j - i * bits
            if -8 < shift < bits:
                code |= padded[..., j] << shift if shift >= 0 else padded[..., j] >> -shift
        codes[..., i] = ((code & (2 * sign - 1)) ^ sign) - sign
    return codes.view(rows, groups * 8)[:, :columns]
