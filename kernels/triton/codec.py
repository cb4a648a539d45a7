"""Quantize, pack, unpack and masks on a GPU: launches the kernels of codec_kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.reference.codec import BLOCK
from dsq.kernels.reference.formats import NAN_EXPONENT
from dsq.kernels.triton import codec_kernels as kernels
from dsq.kernels.triton.launch import Launch
from dsq.kernels.triton.tiles import POWER, SIGNED_E4M3, Grid, Target

GRIDS: dict[type[Format], Grid] = {BFP: POWER, FixedPoint: POWER, SignedNVInt: SIGNED_E4M3}
#: a tile of 32 x 128 values: 16 KiB of float32, eight 16-byte loads a thread
TILE = {"T": 32, "C": BLOCK, "num_warps": 4}
#: blocks along rows: block x 128 values, a warp for so many rows: up to 32 a thread holds whole blocks, whose maximum
#: then needs no exchange
ROWS_OF_WARP = 32
#: a tile holds whole blocks of these lengths
BLOCKS = frozenset((0, 1, 2, 4, 8, 16, 32, 64, 128))
#: into how many parts a tensor is cut to find the largest value of each, at most: at least 16 bytes of them; and the
#: values that a program of ``largest`` reads at once: 64 bytes of float32 a thread
PARTS, STRETCH = (4, 16, 256), {"E": 4096, "num_warps": 8}
#: from here on offsets take 64 bits (a margin below 2**31: a tile may reach beyond the tensor)
WIDE = 1 << 30
#: encoders, decoders and launches of masks that are kept at most: each size that a tensor may have makes another
KEPT = 4096


class Wanted(NamedTuple):
    """How a tensor is to be rounded, and what is made of it."""

    fmt: Format
    layout: Layout
    dtype: torch.dtype | None  #: of values; None: codes and scales
    draws: int | None = None  #: None rounds to nearest, else stochastically: what is added to the seed


#: the dtype of a tensor, which its launches are compiled for, and what is wanted of it
Job = tuple[torch.dtype, tuple[Wanted, ...]]


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    y: Tensor = encoder((x.dtype, (Wanted(fmt, layout, dtype, None if seed is None else 0),)))(seed, x)[0][0]
    return y


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x`` as uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    wanted = Wanted(fmt, layout, None, None if seed is None else 0)
    codes, scales = encoder((x.dtype, (wanted,)))(seed, x)[0][0]
    return codes, scales


class Encoder:
    """Makes what is wanted of one or two contiguous tensors: for each a list of values, or of (codes, scales).

    One launch finds the largest values of both, where a format needs them. A tensor that is wanted with blocks along
    columns and along rows is read once for both, where a tile holds both.
    """

    def __init__(self, *jobs: Job) -> None:
        self.wanted = [wanted for _, wanted in jobs]
        sizes = [_size(wanted[0].layout) for wanted in self.wanted]
        self.empty = not all(sizes)
        asking = [any(map(_exponents, wanted)) for wanted in self.wanted]
        self.largest = _Largest([size if asks else 0 for size, asks in zip(sizes, asking, strict=True)])
        self.roundings = [
            _roundings(wanted, self.largest.parts * asks) for wanted, asks in zip(self.wanted, asking, strict=True)
        ]

    def __call__(self, seed: int | Tensor | None, *tensors: Tensor) -> list[list[Any]]:
        if self.empty:
            return [[_of_nothing(x, it) for it in wanted] for x, wanted in zip(tensors, self.wanted, strict=True)]
        result = []
        with torch.cuda.device_of(tensors[0]):
            largest = self.largest(tensors)
            for x, wanted, parts, roundings in zip(tensors, self.wanted, largest, self.roundings, strict=True):
                made: list[Any] = [None] * len(wanted)
                for rounding in roundings:
                    rounding(x, parts, seed, made)
                result.append(made)
        return result


encoder = lru_cache(KEPT)(Encoder)


def _size(layout: Layout) -> int:
    return layout.outer * layout.rows * layout.columns


def _of_nothing(x: Tensor, wanted: Wanted) -> Any:
    if wanted.dtype is None:
        return REFERENCE.pack(x, wanted.fmt, wanted.layout, None)
    return torch.empty_like(x, dtype=wanted.dtype)


def _exponents(wanted: Wanted) -> tuple[int, int] | None:
    """The lowest and the highest exponent that the format stores for the whole tensor; None: it stores none."""
    fmt = wanted.fmt
    if isinstance(fmt, FixedPoint):
        static = fmt.static_exponent
        return (0, NAN_EXPONENT) if static is None else (static + BIAS, static + BIAS)
    if isinstance(fmt, SignedNVInt):
        return fmt.exponents[0] + BIAS, fmt.exponents[1] + BIAS
    return None


class _Largest:
    """The bits of the largest magnitudes of the parts of each tensor whose size is given, by one launch; 0: of none."""

    def __init__(self, sizes: list[int]) -> None:
        self.asks, asked = [size > 0 for size in sizes], [size for size in sizes if size]
        most = max(asked, default=0)
        self.parts = next((it for it in PARTS if it * STRETCH["E"] >= most), PARTS[-1])
        self.numbers = (*asked, 0)[:2]
        self.launch = Launch(kernels.largest, self.parts * len(asked), PARTS=self.parts, WIDE=most >= WIDE, **STRETCH)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        asked = [x for x, asks in zip(tensors, self.asks, strict=True) if asks]
        if not asked:
            return [None] * len(tensors)
        found = torch.empty(len(asked), self.parts, dtype=torch.int32, device=asked[0].device)
        self.launch((asked[0], asked[1] if len(asked) > 1 else None, found), *self.numbers)
        rows = iter(found.unbind())
        return [next(rows) if asks else None for asks in self.asks]


class _Output:
    """Memory for what is wanted of a tensor, and the kernel's arguments for it."""

    def __init__(self, wanted: Wanted, row_bits: int) -> None:
        fmt, layout, self.dtype, self.draws = wanted
        self.codes, self.scales = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
        self.word = word_of(fmt.bits, row_bits) if self.dtype is None else 8
        low, high = _exponents(wanted) or (-1, -1)
        self.target = Target(GRIDS[type(fmt)], fmt.bits, fmt.smallest_code, low, high, self.dtype is None, self.word)
        self.numbers = prod(self.scales) - 1, row_bits // self.word

    def __call__(self, x: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """Return what is made, and where the kernel writes it."""
        if self.dtype is not None:
            y = torch.empty_like(x, dtype=self.dtype)
            return y, y, None
        codes = torch.empty(self.codes, dtype=torch.uint8, device=x.device)
        scales = torch.empty(self.scales, dtype=torch.uint8, device=x.device)
        return (codes, scales), codes, scales


class _Rounding:
    """One launch that rounds a tensor for one or two things that are wanted of it, each with its place among them."""

    def __init__(self, wanted: Sequence[tuple[int, Wanted]], parts: int) -> None:
        self.places, (first, *others) = zip(*wanted, strict=True)
        how = tiles_for(first.fmt, first.layout, counted=first.draws is not None)
        self.outputs = [_Output(first, how.row_bits), *(_Output(it, _row_bits(it)) for it in others)]
        self.sizes = *how.sizes, first.layout.columns
        to, to_2 = self.outputs[0].target, self.outputs[1].target if others else None
        self.launch = Launch(
            kernels.encode, how.programs, TO=to, TO_2=to_2, PARTS=parts,
            BLOCK_SIZE_2=others[0].fmt.block_size if others else None,
            STOCHASTIC=first.draws is not None, **how.options,
        )  # fmt: skip

    def __call__(self, x: Tensor, largest: Tensor | None, seed: int | Tensor | None, made: list[Any]) -> None:
        """Put what is made at its places in ``made``."""
        tensors: list[Tensor | None] = [x, largest]
        numbers = list(self.sizes)
        for place, output in zip(self.places, self.outputs, strict=True):
            made[place], codes, scales = output(x)
            number, on_device = (0, None) if seed is None else _seeds(seed + (output.draws or 0), x.device)
            tensors += codes, scales, on_device
            numbers += *output.numbers, number
        if len(self.outputs) == 1:
            self.launch((*tensors, None, None, None), *numbers, 0, 0, 0)
        else:
            self.launch(tensors, *numbers)


def _roundings(wanted: Sequence[Wanted], parts: int) -> list[_Rounding]:
    """The launches for what is wanted of a tensor: one if two go together, that with blocks along rows first."""
    placed = list(enumerate(wanted))
    if len(wanted) == 2 and _go_together(*wanted):
        return [_Rounding(sorted(placed, key=lambda it: not it[1].layout.along_rows), parts)]
    return [_Rounding([it], parts) for it in placed]


def _go_together(a: Wanted, b: Wanted) -> bool:
    """Whether a tile of blocks along rows holds the blocks along columns of the other."""
    if a.layout.along_rows == b.layout.along_rows or (a.draws is None) != (b.draws is None):
        return False
    return a.layout.outer == b.layout.outer == 1 and 0 not in (a.fmt.block_size, b.fmt.block_size)


def _seeds(seed: int | Tensor, device: torch.device) -> tuple[int, Tensor | None]:
    """A seed as the kernel takes it: a number, or in a CUDA graph a tensor, which each replay draws anew."""
    if isinstance(seed, Tensor):
        return 0, seed
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 0, torch.randint(2**62, (1,), device=device)
    return seed, None


def unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device=codes.device)
    if y.numel():
        launch, numbers = _decoder(fmt, layout, codes.data_ptr() % 4, dtype)
        with torch.cuda.device_of(codes):
            launch((codes, scales, y), *numbers)
    return y


@lru_cache(KEPT)
def _decoder(fmt: Format, layout: Layout, address: int, dtype: torch.dtype) -> tuple[Launch, tuple[int, ...]]:
    """A launch that unpacks codes at this address, modulo 4, into ``dtype``, and the numbers that it takes."""
    how = tiles_for(fmt, layout, counted=False)
    word = word_of(fmt.bits, how.row_bits, address)
    numbers = *how.sizes, prod(fmt.scale_shape(layout)) - 1, how.row_bits // word
    of_format = {"GRID": GRIDS[type(fmt)], "OF_TENSOR": fmt.tensor_bytes > 0, "BITS": fmt.bits}
    return Launch(kernels.decode, how.programs, **of_format, WORD=word, **how.options), numbers


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the kernels walk a tensor."""

    programs: int
    sizes: tuple[int, int, int]  #: outer * rows, rows, columns
    row_bits: int  #: of codes in a row, padded to a byte
    options: dict[str, int | bool]  #: compile-time arguments


def tiles_for(fmt: Format, layout: Layout, counted: bool) -> Tiles:
    """``counted``: stochastic rounding numbers the values by row and column."""
    flat, by_rows = _is_flat(fmt, layout, counted), layout.along_rows and fmt.block_size > 0
    if flat:
        layout = Layout(1, 1, _size(layout), along_rows=False)
    tile = TILE
    if by_rows:  # with the random numbers one warp would spill
        tile = {
            "T": fmt.block_size,
            "C": BLOCK,
            "num_warps": max(fmt.block_size // ROWS_OF_WARP, 1) * (2 if counted else 1),
        }
    strips = -(-layout.columns // tile["C"])
    if by_rows:
        programs = layout.outer * -(-layout.rows // fmt.block_size) * strips
    else:
        programs = -(-layout.outer * layout.rows * strips // tile["T"])
    options = {"BLOCK_SIZE": fmt.block_size, "ALONG_ROWS": by_rows, "FLAT": flat, "WIDE": _size(layout) >= WIDE, **tile}
    sizes = (layout.outer * layout.rows, layout.rows, layout.columns)
    return Tiles(programs, sizes, 8 * layout.code_shape(fmt.bits)[1], options)


def _is_flat(fmt: Format, layout: Layout, counted: bool) -> bool:
    """Whether the tensor may be taken for one long row, as blocks and bytes (and the blocks of random numbers) end with
    each row: rows of any length then fill the tiles."""
    blocks = fmt.block_size == 0 or (not layout.along_rows and layout.columns % fmt.block_size == 0)
    return blocks and layout.columns * fmt.bits % 8 == 0 and (not counted or layout.columns % BLOCK == 0)


def _row_bits(wanted: Wanted) -> int:
    return 8 * wanted.layout.code_shape(wanted.fmt.bits)[1]


def word_of(bits: int, row_bits: int, address: int = 0) -> int:
    """The bits of the widest words that hold whole codes, of which 32 hold those of 32 codes of up to 8 bits, end with
    the row, and lie at multiples of their size from ``address`` on."""
    for word in (32, 16):
        whole = word % bits == 0 or (word == 32 and bits < 8)
        if whole and row_bits % word == 0 and address % (word // 8) == 0:
            return word
    return 8


# ---- masks

#: bytes of a mask a program: 8 to 32 bytes of values a thread
MASK = {"B": 256, "num_warps": 4}


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    count, flags = x_N.numel(), x_N.dtype is torch.bool
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    of_kernel = _of_mask(kernels.pack_mask, count, x_N.dtype, FLAGS=flags, NAN_IS_OPEN=nan_is_open)
    _launch_mask(of_kernel, (x_N.view(torch.uint8) if flags else x_N, bits), count, float(low), float(high))
    return bits


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    out = torch.empty(count, dtype=dtype, device=bits.device)
    _launch_mask(_of_mask(kernels.unpack_mask, count, dtype), (bits, out), count)
    return out


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    out = torch.empty_like(x)
    _launch_mask(_of_mask(kernels.apply_mask, x.numel(), x.dtype), (bits, x, out), x.numel())
    return out


@lru_cache(KEPT)
def _of_mask(kernel: Any, count: int, dtype: torch.dtype, **options: bool) -> Launch:
    """The launch for a mask of ``count`` values of ``dtype``."""
    return Launch(kernel, -(-count // (8 * MASK["B"])), WIDE=count >= WIDE, **options, **MASK)


def _launch_mask(launch: Launch, tensors: tuple[Tensor, ...], count: int, *limits: float) -> None:
    if count:
        with torch.cuda.device_of(tensors[0]):
            launch(tensors, count, *limits)
