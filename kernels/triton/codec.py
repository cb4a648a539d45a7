"""Quantise, pack, unpack and masks on a GPU: launches the kernels of codec_kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, Layout, SignedBFP, SignedNVInt
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.reference.codec import BLOCK
from dsq.kernels.reference.formats import NAN_EXPONENT
from dsq.kernels.triton import codec_kernels as kernels
from dsq.kernels.triton.tiles import POWER, SIGNED_E4M3, SIGNED_POWER, Grid, Target

GRIDS: dict[type[Format], Grid] = {
    BFP: POWER,
    FixedPoint: POWER,
    SignedBFP: SIGNED_POWER,
    SignedNVInt: SIGNED_E4M3,
}
#: a tile of 32 x 128 values: 16 KiB of float32, eight 16-byte loads a thread
TILE = {"T": 32, "C": BLOCK, "num_warps": 4}
#: boxes along rows: box x 128 values, a warp for so many rows: up to 32 a thread holds whole boxes, whose maximum then
#: needs no exchange
ROWS_OF_WARP = 32
#: a tile holds whole boxes of these lengths
BOXES = frozenset((0, 1, 2, 4, 8, 16, 32, 64, 128))
#: into how many parts a tensor is cut to find the largest value of each, at most; and the values that a program of
#: ``largest`` reads at once: 64 bytes of float32 a thread
PARTS, STRETCH = (1, 16, 256), {"E": 4096, "num_warps": 8}
#: from here on offsets take 64 bits (a margin below 2**31: a tile may reach beyond the tensor)
WIDE = 1 << 30


class Wanted(NamedTuple):
    """How a tensor is to be rounded, and what is made of it."""

    fmt: Format
    layout: Layout
    seed: int | Tensor | None  #: None rounds to nearest, a number stochastically
    dtype: torch.dtype | None  #: of values; None: codes and scales


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    y: Tensor = encode((x, [Wanted(fmt, layout, seed, dtype)]))[0][0]
    return y


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x`` as uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    codes, scales = encode((x, [Wanted(fmt, layout, seed, None)]))[0][0]
    return codes, scales


def encode(*jobs: tuple[Tensor, Sequence[Wanted]]) -> list[list[Any]]:
    """Make what is wanted of one or two tensors: for each a list of values, or of (codes, scales).

    One launch finds the largest values of both, where a format needs them. A tensor that is wanted with boxes along
    columns and along rows is read once for both, where a tile holds both.
    """
    if not all(x.numel() for x, _ in jobs):
        return [[_of_nothing(x, it) for it in wanted] for x, wanted in jobs]
    asking = [any(map(_exponents, wanted)) for _, wanted in jobs]
    largest = iter(_largest(*(x for (x, _), asks in zip(jobs, asking, strict=True) if asks)))
    return [_encode(x, wanted, next(largest) if asks else None) for (x, wanted), asks in zip(jobs, asking, strict=True)]


def unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device=codes.device)
    if y.numel():
        launch = launch_for(fmt, layout, counted=False)
        words, word = words_of(codes, fmt.bits, launch.row_bits)
        with torch.cuda.device_of(y):
            kernels.decode[launch.programs](
                words, scales, scales.view(-1)[-1:], integers_for_bfloat16(y), *launch.sizes, launch.row_bits // word,
                **grid_of(fmt), WORD=word, **launch.options,
            )  # fmt: skip
    return y


def grid_of(fmt: Format) -> dict[str, Any]:
    """Return the format as compile-time arguments of the kernels that read codes."""
    return {"GRID": GRIDS[type(fmt)], "OF_TENSOR": fmt.tensor_bytes > 0, "BITS": fmt.bits}


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


def _largest(*tensors: Tensor) -> list[Tensor]:
    """The bits of the largest magnitudes of the parts of each of up to two tensors, by one launch."""
    if not tensors:
        return []
    x, y = tensors[0], tensors[-1] if len(tensors) > 1 else None
    count = max(t.numel() for t in tensors)
    number = next((it for it in PARTS if it * STRETCH["E"] >= count), PARTS[-1])
    parts = torch.empty(len(tensors), number, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        kernels.largest[(parts.numel(),)](
            integers_for_bfloat16(x), None if y is None else integers_for_bfloat16(y), x.numel(),
            0 if y is None else y.numel(), parts, PARTS=number, WIDE=count >= WIDE, **STRETCH,
        )  # fmt: skip
    return list(parts.unbind())


def _encode(x: Tensor, wanted: Sequence[Wanted], largest: Tensor | None) -> list[Any]:
    """Values or (codes, scales) of ``x``: by one launch if two go together, else by a launch for each."""
    first, *others = wanted
    if others and not _go_together(first, others[0]):
        return [_encode(x, [it], largest)[0] for it in wanted]
    if others and not first.layout.along_rows:
        return _encode(x, wanted[::-1], largest)[::-1]
    launch = launch_for(first.fmt, first.layout, counted=first.seed is not None)
    made, given, target = _prepared(x, first, launch.row_bits)
    found, given_2, target_2, box_2 = [made], [None, None, None, 0, None, 0], None, None
    for other in others:
        made_2, given_2, target_2 = _prepared(x, other, 8 * other.layout.code_shape(other.fmt.bits)[1])
        found, box_2 = [made, made_2], other.fmt.box
    with torch.cuda.device_of(x):
        kernels.encode[launch.programs](
            integers_for_bfloat16(x), largest, *launch.sizes, first.layout.columns, *given, *given_2,
            TO=target, TO_2=target_2, BOX_2=box_2, **launch.options,
            STOCHASTIC=first.seed is not None, PARTS=0 if largest is None else largest.numel(),
        )  # fmt: skip
    return found


def _go_together(a: Wanted, b: Wanted) -> bool:
    """Whether a tile of boxes along rows holds the boxes along columns of the other."""
    if a.layout.along_rows == b.layout.along_rows or (a.seed is None) != (b.seed is None):
        return False
    return a.layout.outer == b.layout.outer == 1 and 0 not in (a.fmt.box, b.fmt.box)


def _prepared(x: Tensor, wanted: Wanted, row_bits: int) -> tuple[Any, list[Any], Target]:
    """Memory for what is wanted of ``x``, and the kernel's arguments for it, at run time and at compile time."""
    fmt, layout, seed, dtype = wanted
    made: Any
    word, scales = 8, None
    if dtype is None:
        codes = torch.empty(layout.code_shape(fmt.bits), dtype=torch.uint8, device=x.device)
        scales = torch.empty(fmt.scale_shape(layout), dtype=torch.uint8, device=x.device)
        made, (out, word) = (codes, scales), words_of(codes, fmt.bits, row_bits)
    else:
        made = torch.empty_like(x, dtype=dtype)
        out = integers_for_bfloat16(made)
    of_tensor = None if scales is None else scales.view(-1)[-1:]
    low, high = _exponents(wanted) or (-1, -1)
    target = Target(GRIDS[type(fmt)], fmt.bits, fmt.smallest_code, low, high, dtype is None, word)
    return made, [out, scales, of_tensor, *_seeds(seed, x.device), row_bits // word], target


def _seeds(seed: int | Tensor | None, device: torch.device) -> tuple[int, Tensor | None]:
    """A seed as the kernel takes it: a number, or in a CUDA graph a tensor, which each replay draws anew."""
    if isinstance(seed, Tensor):
        return 0, seed
    if seed is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 0, torch.randint(2**62, (1,), device=device)
    return seed or 0, None


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels walk a tensor."""

    programs: tuple[int]
    sizes: tuple[int, int, int]  #: outer * rows, rows, columns
    row_bits: int  #: of codes in a row, padded to a byte
    options: dict[str, int | bool]  #: compile-time arguments


@lru_cache(maxsize=256)
def launch_for(fmt: Format, layout: Layout, counted: bool) -> Launch:
    """``counted``: stochastic rounding numbers the values by row and column."""
    flat, by_rows = _is_flat(fmt, layout, counted), layout.along_rows and fmt.box > 0
    if flat:
        layout = Layout(1, 1, layout.outer * layout.rows * layout.columns, along_rows=False)
    tile = TILE
    if by_rows:  # with the random numbers one warp would spill
        tile = {"T": fmt.box, "C": BLOCK, "num_warps": max(fmt.box // ROWS_OF_WARP, 1) * (2 if counted else 1)}
    strips = -(-layout.columns // tile["C"])
    if by_rows:
        programs = layout.outer * -(-layout.rows // fmt.box) * strips
    else:
        programs = -(-layout.outer * layout.rows * strips // tile["T"])
    wide = layout.outer * layout.rows * layout.columns >= WIDE
    options = {"BOX": fmt.box, "ALONG_ROWS": by_rows, "FLAT": flat, "WIDE": wide, **tile}
    sizes = (layout.outer * layout.rows, layout.rows, layout.columns)
    return Launch((programs,), sizes, 8 * layout.code_shape(fmt.bits)[1], options)


def _is_flat(fmt: Format, layout: Layout, counted: bool) -> bool:
    """Whether the tensor may be taken for one long row, as boxes and bytes (and the blocks of random numbers) end with
    each row: rows of any length then fill the tiles."""
    boxes = fmt.box == 0 or (not layout.along_rows and layout.columns % fmt.box == 0)
    return boxes and layout.columns * fmt.bits % 8 == 0 and (not counted or layout.columns % BLOCK == 0)


def words_of(codes: Tensor, bits: int, row_bits: int) -> tuple[Tensor, int]:
    """``codes`` as the widest words that hold whole codes and end with the row; and their width in bits."""
    for dtype, word in ((torch.int32, 32), (torch.int16, 16)):
        if word % bits == 0 and row_bits % word == 0 and codes.data_ptr() % dtype.itemsize == 0:
            return codes.view(-1).view(dtype), word
    return codes, 8


def integers_for_bfloat16(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


# ---- masks

#: bytes of a mask a program: 8 to 32 bytes of values a thread
MASK = {"B": 256, "num_warps": 4}


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    count = x_N.numel()
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    limits, options = (float(low), float(high)), {"FLAGS": x_N.dtype is torch.bool, "NAN_IS_OPEN": nan_is_open}
    values = x_N.view(torch.uint8) if options["FLAGS"] else integers_for_bfloat16(x_N)
    _launch_mask(kernels.pack_mask, count, values, bits, count, *limits, **options)
    return bits


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    out = torch.empty(count, dtype=dtype, device=bits.device)
    _launch_mask(kernels.unpack_mask, count, bits, integers_for_bfloat16(out), count)
    return out


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    out, integers = torch.empty_like(x), torch.int32 if x.dtype is torch.float32 else torch.int16
    _launch_mask(kernels.apply_mask, x.numel(), bits, x.view(integers), out.view(integers), x.numel())
    return out


def _launch_mask(kernel: Any, count: int, *given: Any, **options: bool) -> None:
    """Launch ``kernel`` for a mask of ``count`` values; the first of what it is given is a tensor."""
    if count:
        with torch.cuda.device_of(given[0]):
            kernel[(-(-count // (8 * MASK["B"])),)](*given, WIDE=count >= WIDE, **options, **MASK)
