"""How a saved tensor of a compiled graph is coded: block floating point of 2 to 8 bits a value, and one bit a value of
a mask.

Each function is traced into a graph behind the operation that makes the tensor, or before its first reader in the
backward. On a CPU it is an operator over dsq's kernels, since Inductor does not vectorize bit packing there. Elsewhere
it is ``fused``: plain operations, which Inductor fuses with their neighbors. The codes of a block are then whole words,
so that its maximum and its codes come from one reduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import optimization_hint, statically_known_true

from dsq.formats import BFP, BIAS
from dsq.kernels.dispatch import define, pack_mask, unpack_mask
from dsq.stash_bits import MAX_GRAPH_BITS

BLOCK_SIZE = 16
MASK_WORD = 8  #: bits of a mask in one byte

#: widths of the planes that hold the codes of so many bits, lowest bits first; and the word that holds a block of one
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_WORDS = {8: torch.int8, 4: torch.int64, 2: torch.int32, 1: torch.int16}

#: 1.5 * 2^23 and its bits: the low bits of a float32 sum with it are the other summand, rounded to nearest, ties to
#: even
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A dense tensor as rows of neighbors in memory, of which only the number may be symbolic."""

    order: tuple[int, ...]  #: dimensions of the tensor, from the widest stride to the narrowest
    columns: tuple[int, ...]  #: sizes of the last of these dimensions, which make a row

    @staticmethod
    def of(x: Tensor, multiple: int) -> "RowLayout | None":
        """Return the layout whose rows have a multiple of ``multiple`` values; None if ``x`` has gaps, or no such rows
        whatever its symbolic sizes are."""
        order = tuple(sorted(range(x.dim()), key=lambda d: (-optimization_hint(x.stride()[d], 1), d)))
        stride: int | torch.SymInt = 1
        columns: list[int] = []
        for d in reversed(order):
            if not statically_known_true(x.size(d) == 1) and not statically_known_true(x.stride()[d] == stride):
                return None
            stride = stride * x.size(d)
            if isinstance(x.size(d), int) and (not columns or prod(columns) % multiple):
                columns.insert(0, x.size(d))
            elif not columns or prod(columns) % multiple:
                return None
        return RowLayout(order, tuple(columns)) if columns and prod(columns) % multiple == 0 else None

    @property
    def leading(self) -> int:
        """Return how many dimensions count the rows."""
        return len(self.order) - len(self.columns)

    def rows(self, x: Tensor) -> Tensor:
        """Return the values of ``x`` as (..., columns)."""
        x = x.permute(self.order)
        return x.reshape(*x.shape[: self.leading], prod(self.columns))

    def restore(self, rows: Tensor) -> Tensor:
        """Return the tensor whose ``rows`` these are, with its strides."""
        x = rows.view(*rows.shape[:-1], *self.columns)
        return x.permute([self.order.index(d) for d in range(len(self.order))])


def encode(x: Tensor, bits: int, layout: RowLayout, fused: bool) -> list[Tensor]:
    """Return what is saved of the floating tensor ``x``: codes, then a biased exponent a block, as uint8.

    The values are those of BFP(bits, 16) with blocks of neighbors in memory (kernels/reference), by dsq's operators or,
    ``fused``, by plain operations, whose step is never under 2^-125.
    """
    rows = layout.rows(x)
    if not fused:
        codes, scales = torch.ops.dsq.pack(rows, str(BFP(bits, BLOCK_SIZE)), -1, None)
        return [codes.view(*rows.shape[:-1], -1), scales.view(*rows.shape[:-1], -1)]
    blocks = rows.unflatten(-1, (-1, BLOCK_SIZE)).float()
    magnitudes = blocks.view(torch.int32) & 0x7FFFFFFF  # in the order of the values, and a NaN above infinity
    exponents = magnitudes.amax(-1, keepdim=True) >> 23
    inverse_step = ((2 * BIAS + bits - 2 - exponents.clamp(bits, 254)) << 23).view(torch.float32)
    largest = BFP(bits, BLOCK_SIZE).largest_code
    codes = ((blocks * inverse_step + _ROUND).view(torch.int32) - _ROUND_BITS).clamp(-largest, largest)
    return [*_planes(codes, bits), exponents.squeeze(-1).to(torch.uint8)]


def decode(*saved: Tensor, bits: int, layout: RowLayout, dtype: torch.dtype, fused: bool) -> Tensor:
    """Return the tensor that ``encode`` saved, in ``dtype``; NaN in a block that held a NaN or an infinity."""
    *planes, exponents = saved
    if not fused:
        codes, scales = (part.reshape(-1, part.shape[-1]) for part in saved)
        shape = (codes.shape[0], prod(layout.columns))
        rows = torch.ops.dsq.unpack(codes, scales, str(BFP(bits, BLOCK_SIZE)), shape, -1, dtype)
        return layout.restore(rows.view(*exponents.shape[:-1], -1))
    biased = exponents.to(torch.int32).unsqueeze(-1)
    step = ((biased.clamp(bits, 254) - (bits - 2)) << 23).view(torch.float32)
    step = torch.where(biased == 255, torch.nan, step)
    return layout.restore((_codes(planes, bits).float() * step).to(dtype).flatten(-2))


def _planes(codes: Tensor, bits: int) -> list[Tensor]:
    """Return the words of int32 ``codes``, (..., blocks, 16): of 8 bits one a value, else one a block and plane."""
    if bits == MAX_GRAPH_BITS:
        return [codes.flatten(-2).to(torch.int8)]
    planes, low = [], 0
    position = torch.arange(BLOCK_SIZE, device=codes.device)
    for width in _PLANES[bits]:
        wide = torch.int64 if width == 4 else torch.int32
        digits = ((codes >> low) & ((1 << width) - 1)).to(wide)
        planes.append((digits << (width * position).to(wide)).sum(-1, dtype=wide).to(_WORDS[width]))
        low += width
    return planes


def _codes(planes: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes, int32 (..., blocks, 16), of the words that ``_planes`` gave."""
    codes, low = torch.zeros((), dtype=torch.int32, device=planes[0].device), 0
    if bits == MAX_GRAPH_BITS:
        values: Tensor = planes[0].unflatten(-1, (-1, BLOCK_SIZE))
        return values.to(torch.int32)
    position = torch.arange(BLOCK_SIZE, device=planes[0].device)
    for width, plane in zip(_PLANES[bits], planes, strict=True):
        wide = torch.int64 if width == 4 else torch.int32
        digits = (plane.to(wide).unsqueeze(-1) >> (width * position).to(wide)).to(torch.int32) & ((1 << width) - 1)
        codes, low = codes + (digits << low), low + width
    sign = 1 << (bits - 1)
    return (codes ^ sign) - sign


def encode_mask(x: Tensor, layout: RowLayout, fused: bool) -> list[Tensor]:
    """Return the bits of the bool tensor ``x``, eight a byte."""
    rows = layout.rows(x)
    if not fused:
        return [torch.ops.dsq.pack_mask(rows).view(*rows.shape[:-1], -1)]
    position = torch.arange(MASK_WORD, device=x.device, dtype=torch.int32)
    words = rows.unflatten(-1, (-1, MASK_WORD)).to(torch.int32) << position
    return [words.sum(-1, dtype=torch.int32).to(torch.uint8)]


def decode_mask(*saved: Tensor, layout: RowLayout, fused: bool) -> Tensor:
    """Return the bool tensor that ``encode_mask`` saved."""
    (words,) = saved
    if not fused:
        rows = torch.ops.dsq.unpack_mask(words.reshape(-1), words.numel() * MASK_WORD)
        return layout.restore(rows.view(*words.shape[:-1], -1))
    position = torch.arange(MASK_WORD, device=words.device, dtype=torch.int32)
    return layout.restore(((words.to(torch.int32).unsqueeze(-1) >> position) & 1).bool().flatten(-2))


define(
    "pack_mask(Tensor x) -> Tensor",
    lambda x: pack_mask(x, 0.0, float("nan"), True),
    lambda x: x.new_empty(x.numel() // MASK_WORD, dtype=torch.uint8),
)
define(
    "unpack_mask(Tensor bits, SymInt count) -> Tensor",
    lambda bits, count: unpack_mask(bits, count, torch.float32).bool(),
    lambda bits, count: bits.new_empty(count, dtype=torch.bool),
)
