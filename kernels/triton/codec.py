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
from dsq.kernels.triton.tiles import POWER, SIGNED_E4M3, ScalingFunctions, Target

SCALINGS: dict[type[Format], ScalingFunctions] = {BFP: POWER, FixedPoint: POWER, SignedNVInt: SIGNED_E4M3}
#: a tile of 32 x 128 values: 16 KiB of float32, eight 16-byte loads a thread
TILE = {"T": 32, "C": BLOCK, "num_warps": 4}
#: for blocks along rows a tile has one block of rows by 128 columns, and a warp for this many rows: up to 32 rows, each
#: thread holds whole blocks, whose maximum then needs no exchange
ROWS_OF_WARP = 32
#: the block sizes of which a tile holds whole blocks
BLOCKS = frozenset((0, 1, 2, 4, 8, 16, 32, 64, 128))
#: the numbers of parts into which ``largest`` may cut a tensor. It writes the largest value of each part, so four parts
#: fill 16 bytes
PARTS = (4, 16, 256)
#: the values that a program of ``largest`` reads at once: 64 bytes of float32 a thread
STRETCH = {"E": 4096, "num_warps": 8}
#: tensors of this many values and more take offsets of 64 bits. The limit is below 2**31, as a tile may reach beyond
#: the tensor
WIDE_NUMEL = 1 << 30
#: the largest number of encoders, of decoders and of launches for masks in their caches: each tensor size has its own
MAX_CACHED_LAUNCHES = 4096


class Request(NamedTuple):
    """How a tensor is to be rounded, and the form of the result."""

    fmt: Format
    layout: Layout
    dtype: torch.dtype | None  #: of the values; None: codes and scales
    seed_offset: int | None = None  #: added to the seed of stochastic rounding; None: round to nearest

    @property
    def stochastic(self) -> bool:
        """Whether to round stochastically."""
        return self.seed_offset is not None

    @property
    def row_bits(self) -> int:
        """The bits of the codes of a row, padded to a byte."""
        return 8 * self.layout.code_shape(self.fmt.bits)[1]


#: the dtype of a tensor, for which its launches are compiled, and the requests for it
Job = tuple[torch.dtype, tuple[Request, ...]]


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x`` rounded to the grid, as ``dtype``: to nearest if ``seed`` is None, else stochastically."""
    request = Request(fmt, layout, dtype, None if seed is None else 0)
    y: Tensor = encoder((x.dtype, (request,)))(seed, x)[0][0]
    return y


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of ``x``: uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    request = Request(fmt, layout, None, None if seed is None else 0)
    codes, scales = encoder((x.dtype, (request,)))(seed, x)[0][0]
    return codes, scales


class Encoder:
    """Serves the requests for one or two contiguous tensors: returns for each a list of values, or of (codes, scales).

    One launch finds the largest values of both tensors, if a format needs them. A tensor that is requested with blocks
    along columns and along rows is read once for both, if a tile holds both.
    """

    def __init__(self, *jobs: Job) -> None:
        self.requests = [requests for _, requests in jobs]
        sizes = [_size(requests[0].layout) for requests in self.requests]
        self.is_empty = not all(sizes)
        need_largest = [any(map(_exponents, requests)) for requests in self.requests]
        self.largest = _Largest([size if need else 0 for size, need in zip(sizes, need_largest, strict=True)])
        self.roundings = [
            _roundings(requests, self.largest.parts * need)
            for requests, need in zip(self.requests, need_largest, strict=True)
        ]

    def __call__(self, seed: int | Tensor | None, *tensors: Tensor) -> list[list[Any]]:
        if self.is_empty:
            return [
                [_empty_result(x, request) for request in requests]
                for x, requests in zip(tensors, self.requests, strict=True)
            ]
        results = []
        with torch.cuda.device_of(tensors[0]):
            largest = self.largest(tensors)
            for x, requests, parts, roundings in zip(tensors, self.requests, largest, self.roundings, strict=True):
                result: list[Any] = [None] * len(requests)
                for rounding in roundings:
                    rounding(x, parts, seed, result)
                results.append(result)
        return results


encoder = lru_cache(MAX_CACHED_LAUNCHES)(Encoder)


def _size(layout: Layout) -> int:
    return layout.outer * layout.rows * layout.columns


def _empty_result(x: Tensor, request: Request) -> Any:
    if request.dtype is None:
        return REFERENCE.pack(x, request.fmt, request.layout, None)
    return torch.empty_like(x, dtype=request.dtype)


def _exponents(request: Request) -> tuple[int, int] | None:
    """Return the lowest and the highest exponent that the format stores for the whole tensor; None if it stores
    none."""
    fmt = request.fmt
    if isinstance(fmt, FixedPoint):
        static = fmt.static_exponent
        return (0, NAN_EXPONENT) if static is None else (static + BIAS, static + BIAS)
    if isinstance(fmt, SignedNVInt):
        return fmt.exponents[0] + BIAS, fmt.exponents[1] + BIAS
    return None


class _Largest:
    """One launch that finds the bits of the largest magnitude of each part of each tensor, for tensors of these sizes;
    a tensor of size 0 is left out."""

    def __init__(self, sizes: list[int]) -> None:
        self.included = [size > 0 for size in sizes]
        self.counts = [size for size in sizes if size]
        largest_count = max(self.counts, default=0)
        self.parts = next((parts for parts in PARTS if parts * STRETCH["E"] >= largest_count), PARTS[-1])
        wide = largest_count >= WIDE_NUMEL
        self.launch = Launch(kernels.largest, self.parts * len(self.counts), PARTS=self.parts, WIDE=wide, **STRETCH)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        inputs = [x for x, included in zip(tensors, self.included, strict=True) if included]
        if not inputs:
            return [None] * len(tensors)
        parts = torch.empty(len(inputs), self.parts, dtype=torch.int32, device=inputs[0].device)
        x, y = (*inputs, None)[:2]
        x_count, y_count = (*self.counts, 0)[:2]
        self.launch(x_pointer=x, y_pointer=y, out_pointer=parts, x_count=x_count, y_count=y_count)
        rows = iter(parts.unbind())
        return [next(rows) if included else None for included in self.included]


class _Output:
    """Allocates the result of a request, and gives the kernel's arguments for it, whose names end in ``suffix``."""

    def __init__(self, request: Request, row_bits: int, suffix: str) -> None:
        fmt, layout, self.dtype, self.seed_offset = request
        self.code_shape = layout.code_shape(fmt.bits)
        self.scale_shape = fmt.scale_shape(layout)
        self.names = [f"{name}{suffix}" for name in kernels.Output._fields]
        word = word_of(fmt.bits, row_bits) if self.dtype is None else 8
        low, high = _exponents(request) or (-1, -1)
        self.target = Target(SCALINGS[type(fmt)], fmt.bits, fmt.smallest_code, low, high, self.dtype is None, word)
        self.exponent_place = prod(self.scale_shape) - 1
        self.row_words = row_bits // word

    def __call__(self, x: Tensor, seed: int | Tensor | None) -> tuple[Any, dict[str, Any]]:
        """Return the result, which the kernel is yet to write, and the kernel's arguments."""
        if self.dtype is not None:
            result: Any = torch.empty_like(x, dtype=self.dtype)
            out, scales = result, None
        else:
            out = torch.empty(self.code_shape, dtype=torch.uint8, device=x.device)
            scales = torch.empty(self.scale_shape, dtype=torch.uint8, device=x.device)
            result = out, scales
        number, seed_tensor = (0, None) if seed is None else _seeds(seed + (self.seed_offset or 0), x.device)
        arguments = kernels.Output(out, scales, self.exponent_place, self.row_words, number, seed_tensor)
        return result, dict(zip(self.names, arguments, strict=True))


class _Rounding:
    """One launch that rounds a tensor for one or two requests, each given with its place in the list of results."""

    def __init__(self, placed_requests: Sequence[tuple[int, Request]], parts: int) -> None:
        self.places, (first, *second) = zip(*placed_requests, strict=True)
        tiling = tiles_for(first.fmt, first.layout, counted=first.stochastic)
        self.outputs = [_Output(first, tiling.row_bits, "")]
        self.outputs += [_Output(request, request.row_bits, "_2") for request in second]
        self.sizes = {**tiling.sizes, "width": first.layout.columns}
        self.launch = Launch(
            kernels.encode,
            tiling.programs,
            TARGET=self.outputs[0].target,
            TARGET_2=self.outputs[1].target if second else None,
            BLOCK_SIZE_2=second[0].fmt.block_size if second else None,
            PARTS=parts,
            STOCHASTIC=first.stochastic,
            **tiling.options,
        )

    def __call__(self, x: Tensor, largest: Tensor | None, seed: int | Tensor | None, results: list[Any]) -> None:
        """Put the results at their places in ``results``."""
        arguments = _NO_SECOND_OUTPUT
        for place, output in zip(self.places, self.outputs, strict=True):
            results[place], of_output = output(x, seed)
            arguments = arguments | of_output
        self.launch(x_pointer=x, largest_pointer=largest, **arguments, **self.sizes)


#: the arguments of ``encode`` for a second output that is not requested
_NO_SECOND_OUTPUT = {f"{name}_2": None if name.endswith("pointer") else 0 for name in kernels.Output._fields}


def _roundings(requests: Sequence[Request], parts: int) -> list[_Rounding]:
    """Return the launches for the requests of a tensor. Two that go together are one launch, blocks along rows
    first."""
    placed_requests = list(enumerate(requests))
    if len(requests) == 2 and _go_together(*requests):
        return [_Rounding(sorted(placed_requests, key=lambda placed: not placed[1].layout.along_rows), parts)]
    return [_Rounding([placed], parts) for placed in placed_requests]


def _go_together(a: Request, b: Request) -> bool:
    """Return whether a tile of blocks along rows holds the blocks along columns of the other."""
    if a.layout.along_rows == b.layout.along_rows or a.stochastic != b.stochastic:
        return False
    return a.layout.outer == b.layout.outer == 1 and 0 not in (a.fmt.block_size, b.fmt.block_size)


def _seeds(seed: int | Tensor, device: torch.device) -> tuple[int, Tensor | None]:
    """Return a seed as the kernel takes it: a number, or in a CUDA graph a tensor, which each replay draws anew."""
    if isinstance(seed, Tensor):
        return 0, seed
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 0, torch.randint(2**62, (1,), device=device)
    return seed, None


def unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the values of packed ``codes`` as ``dtype``, of shape (outer, rows, columns)."""
    y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device=codes.device)
    if y.numel():
        launch, sizes = _decoder(fmt, layout, codes.data_ptr() % 4, dtype)
        with torch.cuda.device_of(codes):
            launch(codes_pointer=codes, scales_pointer=scales, y_pointer=y, **sizes)
    return y


@lru_cache(MAX_CACHED_LAUNCHES)
def _decoder(fmt: Format, layout: Layout, address: int, dtype: torch.dtype) -> tuple[Launch, dict[str, int]]:
    """Return a launch that unpacks codes at this address, modulo 4, into ``dtype``, and its arguments that are
    sizes."""
    tiling = tiles_for(fmt, layout, counted=False)
    word = word_of(fmt.bits, tiling.row_bits, address)
    exponent_place = prod(fmt.scale_shape(layout)) - 1
    sizes = {**tiling.sizes, "exponent_place": exponent_place, "row_words": tiling.row_bits // word}
    of_format = {"SCALING": SCALINGS[type(fmt)], "OF_TENSOR": fmt.tensor_bytes > 0, "BITS": fmt.bits}
    return Launch(kernels.decode, tiling.programs, **of_format, WORD=word, **tiling.options), sizes


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernels walk a tensor."""

    programs: int
    sizes: dict[str, int]  #: arguments: lines (outer * rows), rows, columns
    row_bits: int  #: of codes in a row, padded to a byte
    options: dict[str, int | bool]  #: compile-time arguments


def tiles_for(fmt: Format, layout: Layout, counted: bool) -> Tiling:
    """Return the tiling of a tensor. ``counted``: stochastic rounding numbers the values by row and column."""
    flat = _is_flat(fmt, layout, counted)
    by_rows = layout.along_rows and fmt.block_size > 0
    if flat:
        layout = Layout(1, 1, _size(layout), along_rows=False)
    tile = TILE
    if by_rows:  # with the random numbers one warp would spill
        warps = max(fmt.block_size // ROWS_OF_WARP, 1) * (2 if counted else 1)
        tile = {"T": fmt.block_size, "C": BLOCK, "num_warps": warps}
    lines = layout.outer * layout.rows
    strips = -(-layout.columns // tile["C"])
    tiles_down = layout.outer * -(-layout.rows // fmt.block_size) if by_rows else 0
    programs = tiles_down * strips if by_rows else -(-lines * strips // tile["T"])
    wide = _size(layout) >= WIDE_NUMEL
    options = {"BLOCK_SIZE": fmt.block_size, "ALONG_ROWS": by_rows, "FLAT": flat, "WIDE": wide, **tile}
    sizes = {"lines": lines, "rows": layout.rows, "columns": layout.columns}
    return Tiling(programs, sizes, 8 * layout.code_shape(fmt.bits)[1], options)


def _is_flat(fmt: Format, layout: Layout, counted: bool) -> bool:
    """Return whether the tensor may be taken for one long row, as blocks and bytes (and the blocks of random numbers)
    end with each row: rows of any length then fill the tiles."""
    rows_are_whole = fmt.block_size == 0 or (not layout.along_rows and layout.columns % fmt.block_size == 0)
    return rows_are_whole and layout.columns * fmt.bits % 8 == 0 and (not counted or layout.columns % BLOCK == 0)


def word_of(bits: int, row_bits: int, address: int = 0) -> int:
    """Return the bits of the widest word in which codes are stored: 32, 16 or 8.

    A word must hold whole codes, of which 32 words of 32 bits do for codes of up to 8 bits; words must end with the
    row; and they must lie at multiples of their size from ``address`` on.
    """
    for word in (32, 16):
        holds_codes = word % bits == 0 or (word == 32 and bits < 8)
        if holds_codes and row_bits % word == 0 and address % (word // 8) == 0:
            return word
    return 8


# ---- masks

#: the bytes of a mask that a program serves: 8 to 32 bytes of values a thread
MASK = {"B": 256, "num_warps": 4}


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """Return the mask, as kernels/reference/stash.py defines it."""
    count = x_N.numel()
    flags = x_N.dtype is torch.bool
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    launch = _mask_launch(kernels.pack_mask, count, x_N.dtype, FLAGS=flags, NAN_IS_OPEN=nan_is_open)
    x_N = x_N.view(torch.uint8) if flags else x_N
    _launch_mask(launch, count, x_pointer=x_N, bits_pointer=bits, low=float(low), high=float(high))
    return bits


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the values, as kernels/reference/stash.py defines them."""
    y = torch.empty(count, dtype=dtype, device=bits.device)
    _launch_mask(_mask_launch(kernels.unpack_mask, count, dtype), count, bits_pointer=bits, y_pointer=y)
    return y


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """Return the masked values, as kernels/reference/stash.py defines them."""
    y = torch.empty_like(x)
    launch = _mask_launch(kernels.apply_mask, x.numel(), x.dtype)
    _launch_mask(launch, x.numel(), bits_pointer=bits, x_pointer=x, y_pointer=y)
    return y


@lru_cache(MAX_CACHED_LAUNCHES)
def _mask_launch(kernel: Any, count: int, dtype: torch.dtype, **options: bool) -> Launch:
    """Return the launch for a mask of ``count`` values of ``dtype``."""
    return Launch(kernel, -(-count // (8 * MASK["B"])), WIDE=count >= WIDE_NUMEL, **options, **MASK)


def _launch_mask(launch: Launch, count: int, bits_pointer: Tensor, **arguments: Any) -> None:
    if count:
        with torch.cuda.device_of(bits_pointer):
            launch(bits_pointer=bits_pointer, count=count, **arguments)
