"""Quantise, pack, unpack and masks on a GPU: launches the kernels of codec_kernels."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
#: a function that makes a kernel's arguments of compile time
Options = Callable[[], dict[str, Any]]
#: (kernel, device, what the caller says, alignments) -> a compiled kernel, and its arguments of compile time
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
#: the compiled kernels that are kept at most: each size that a tensor may have makes another
COMPILED = 4096


def launch(kernel: Any, programs: int, args: tuple[Any, ...], options: Options, *key: Hashable) -> None:
    """Launch ``kernel`` for tensors on one device, of which the first argument is one.

    Triton looks up by all arguments what it compiled, which takes the host longer than the kernel runs. ``key`` says
    it at once: what ``options`` gives, types and whole numbers must follow from it.
    """
    # Triton compiles another kernel for what is not given, and for what is not aligned to 16 bytes
    aligned = [x if x is None else x.data_ptr() % 16 == 0 for x in args if type(x) not in (int, float)]
    known = (kernel.__name__, args[0].get_device(), key, *aligned)
    with torch.cuda.device_of(args[0]):
        if (found := _compiled.get(known)) is not None:
            compiled, last = found
            compiled[programs, 1, 1](*args, *last)
            return
        named = options()
        compiled = kernel[(programs,)](*args, **named)
        if compiled is not None:  # as it is where the kernel is interpreted
            if len(_compiled) >= COMPILED:  # not ==, which two threads may pass
                _compiled.clear()
            _compiled[known] = compiled, tuple(named[name] for name in kernel.arg_names[len(args) :])


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
        how = launch_for(fmt, layout, counted=False)
        words, word = words_of(codes, fmt.bits, how.row_bits)
        of_tensor = scales.view(-1)[-1:] if fmt.tensor_bytes else None
        args = words, scales, of_tensor, integers_for_bfloat16(y), *how.sizes, how.row_bits // word
        options: Options = partial(dict, **grid_of(fmt), WORD=word, **how.options)
        launch(kernels.decode, how.programs, args, options, fmt, layout, word, dtype)
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
    of_y = (None, 0) if y is None else (integers_for_bfloat16(y), y.numel())
    args = integers_for_bfloat16(x), of_y[0], x.numel(), of_y[1], parts
    options: Options = partial(dict, PARTS=number, WIDE=count >= WIDE, **STRETCH)
    launch(kernels.largest, parts.numel(), args, options, x.dtype, x.numel(), y is not None and y.dtype, of_y[1])
    return list(parts.unbind())


def _encode(x: Tensor, wanted: Sequence[Wanted], largest: Tensor | None) -> list[Any]:
    """Values or (codes, scales) of ``x``: by one launch if two go together, else by a launch for each."""
    first, *others = wanted
    if others and not _go_together(first, others[0]):
        return [_encode(x, [it], largest)[0] for it in wanted]
    if others and not first.layout.along_rows:
        return _encode(x, wanted[::-1], largest)[::-1]
    how = launch_for(first.fmt, first.layout, counted=first.seed is not None)
    made, given, word = _prepared(x, first, how.row_bits)
    found, given_2, word_2 = [made], _NONE, 0
    for other in others:
        made_2, given_2, word_2 = _prepared(x, other, 8 * other.layout.code_shape(other.fmt.bits)[1])
        found.append(made_2)

    def options() -> dict[str, Any]:
        to_2, box_2 = (_target(others[0], word_2), others[0].fmt.box) if others else (None, None)
        parts = 0 if largest is None else largest.numel()
        named = {"TO": _target(first, word), "TO_2": to_2, "BOX_2": box_2, "PARTS": parts, **how.options}
        return {**named, "STOCHASTIC": first.seed is not None}

    args = integers_for_bfloat16(x), largest, *how.sizes, first.layout.columns, *given, *given_2
    key = x.dtype, largest is not None and largest.numel(), word, word_2
    said = [(it.fmt, it.layout, it.dtype, it.seed is None) for it in wanted]
    launch(kernels.encode, how.programs, args, options, *key, *said)
    return found


def _go_together(a: Wanted, b: Wanted) -> bool:
    """Whether a tile of boxes along rows holds the boxes along columns of the other."""
    if a.layout.along_rows == b.layout.along_rows or (a.seed is None) != (b.seed is None):
        return False
    return a.layout.outer == b.layout.outer == 1 and 0 not in (a.fmt.box, b.fmt.box)


#: the kernel's arguments for a second thing, where a tensor is rounded once
_NONE = [None, None, None, 0, None, 0]


def _prepared(x: Tensor, wanted: Wanted, row_bits: int) -> tuple[Any, list[Any], int]:
    """Memory for what is wanted of ``x``, the kernel's arguments for it, and the bits of the words of codes."""
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
    of_tensor = None if scales is None or _exponents(wanted) is None else scales.view(-1)[-1:]
    return made, [out, scales, of_tensor, *_seeds(seed, x.device), row_bits // word], word


def _target(wanted: Wanted, word: int) -> Target:
    """The Target that the kernel is compiled for."""
    fmt, (low, high) = wanted.fmt, _exponents(wanted) or (-1, -1)
    return Target(GRIDS[type(fmt)], fmt.bits, fmt.smallest_code, low, high, wanted.dtype is None, word)


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

    programs: int
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
    return Launch(programs, sizes, 8 * layout.code_shape(fmt.bits)[1], options)


def _is_flat(fmt: Format, layout: Layout, counted: bool) -> bool:
    """Whether the tensor may be taken for one long row, as boxes and bytes (and the blocks of random numbers) end with
    each row: rows of any length then fill the tiles."""
    boxes = fmt.box == 0 or (not layout.along_rows and layout.columns % fmt.box == 0)
    return boxes and layout.columns * fmt.bits % 8 == 0 and (not counted or layout.columns % BLOCK == 0)


def words_of(codes: Tensor, bits: int, row_bits: int) -> tuple[Tensor, int]:
    """``codes`` as the widest words that hold whole codes, of which 32 hold those of 32 codes of up to 8 bits, and end
    with the row; and their width in bits."""
    for dtype, word in ((torch.int32, 32), (torch.int16, 16)):
        whole = word % bits == 0 or (word == 32 and bits < 8)
        if whole and row_bits % word == 0 and codes.data_ptr() % dtype.itemsize == 0:
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
        named: Options = partial(dict, WIDE=count >= WIDE, **options, **MASK)
        types = [getattr(x, "dtype", None) for x in given]
        launch(kernel, -(-count // (8 * MASK["B"])), given, named, count, *types, *options.values())
