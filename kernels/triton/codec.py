"""Quantise, pack, unpack and masks on a GPU: launches the kernels of codec_kernels."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout, SignedBFP, SignedNVInt
from dsq.formats.fixed_point import BIAS
from dsq.kernels.reference.codec import BLOCK
from dsq.kernels.reference.formats import NAN_EXPONENT
from dsq.kernels.triton import codec_kernels as kernels
from dsq.kernels.triton.tiles import POWER, SIGNED_E4M3, SIGNED_POWER, Grid

GRIDS: dict[type[Format], Grid] = {
    BFP: POWER,
    FixedPoint: POWER,
    SignedBFP: SIGNED_POWER,
    SignedNVInt: SIGNED_E4M3,
}
#: a tile of 32 x 128 values: 16 KiB of float32, eight 16-byte loads a thread
TILE = {"T": 32, "C": BLOCK, "num_warps": 4}
#: boxes along rows: box x 128 values for one warp, a thread holding whole boxes, whose maximum then needs no exchange
BOX_TILE = {"C": BLOCK, "num_warps": 1}
#: a tile holds whole boxes of these lengths, along columns and along rows (more rows would not fit the registers);
#: other boxes have their scales made first
BOXES_OF_COLUMNS, BOXES_OF_ROWS = (8, 16, 32, 64, 128), (8, 16, 32)
#: boxes that a program of box_scales works on
BOXES_OF_PROGRAM = 512
#: from here on offsets take 64 bits (a margin below 2**31: a tile may reach beyond the tensor)
WIDE = 1 << 30


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    y = torch.empty_like(x, dtype=dtype)
    scales = None if holds_boxes(fmt, layout) and not _of_tensor(fmt) else _scales_first(x, fmt, layout)
    _encode(x, y, None, scales, fmt, layout, seed)
    return y


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x`` as uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    codes = torch.empty(layout.code_shape(fmt.bits), dtype=torch.uint8, device=x.device)
    scales = _scales_first(x, fmt, layout)
    _encode(x, None, codes, scales, fmt, layout, seed)
    return codes, scales


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
    """Return the format as compile-time arguments of the kernels."""
    return {"GRID": GRIDS[type(fmt)], "OF_TENSOR": fmt.tensor_bytes > 0, "BITS": fmt.bits}


def _encode(
    x: Tensor, y: Tensor | None, codes: Tensor | None, scales: Tensor | None, fmt: Format, layout: Layout,
    seed: int | Tensor | None,
) -> None:  # fmt: skip
    """Quantise ``x`` into ``y`` or pack it into ``codes``; the boxes' ``scales`` are read where no tile holds a whole
    box, else written with the codes."""
    if not x.numel():
        return
    launch = launch_for(fmt, layout, counted=seed is not None)
    words, word = (None, 8) if codes is None else words_of(codes, fmt.bits, launch.row_bits)
    of_tensor = None if scales is None else scales.view(-1)[-1:]
    with torch.cuda.device_of(x):
        kernels.encode[launch.programs](
            integers_for_bfloat16(x), None if y is None else integers_for_bfloat16(y), words,
            scales, of_tensor, *_seeds(seed, x.device), *launch.sizes, layout.columns, launch.row_bits // word,
            **grid_of(fmt), SMALLEST=fmt.smallest_code, STOCHASTIC=seed is not None, PACK=codes is not None, WORD=word,
            **launch.options,
        )  # fmt: skip


def _seeds(seed: int | Tensor | None, device: torch.device) -> tuple[int, Tensor | None]:
    """A seed as the kernel takes it: a number, or in a CUDA graph a tensor, which each replay draws anew."""
    if isinstance(seed, Tensor):
        return 0, seed
    if seed is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 0, torch.randint(2**62, (1,), device=device)
    return seed or 0, None


def _scales_first(x: Tensor, fmt: Format, layout: Layout) -> Tensor:
    """Memory for the scales of ``x``, with those that have to be known before a value is rounded: the tensor's own, and
    those of boxes that no tile holds."""
    scales = torch.empty(fmt.scale_shape(layout), dtype=torch.uint8, device=x.device)
    of_tensor = scales.view(-1)[-1:]
    if _of_tensor(fmt):
        of_tensor.copy_(_tensor_exponent(x, fmt))
    boxes = layout.boxes(fmt.box)
    if fmt.box and boxes and not holds_boxes(fmt, layout):
        with torch.cuda.device_of(x):
            kernels.box_scales[(-(-boxes // BOXES_OF_PROGRAM),)](
                integers_for_bfloat16(x), scales, of_tensor, boxes, layout.rows, layout.columns, **grid_of(fmt),
                BOX=fmt.box, ALONG_ROWS=layout.along_rows, P=BOXES_OF_PROGRAM, WIDE=x.numel() >= WIDE,
            )  # fmt: skip
    return scales


def _of_tensor(fmt: Format) -> bool:
    """Whether the last of the scales is the tensor's."""
    return fmt.box == 0 or fmt.tensor_bytes > 0


def _tensor_exponent(x: Tensor, fmt: Format) -> Tensor:
    if x.numel():
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)
    else:
        largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    stored = largest.view(torch.int32) >> 23 & NAN_EXPONENT
    if isinstance(fmt, FixedPoint) and fmt.static_exponent is not None:
        return torch.where(stored == NAN_EXPONENT, stored, fmt.static_exponent + BIAS)
    if isinstance(fmt, SignedNVInt):
        within = stored.clamp(*(bound + BIAS for bound in SignedNVInt.exponents))
        return torch.where(stored == NAN_EXPONENT, stored, within)
    return stored


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
    inside = holds_boxes(fmt, layout)
    flat = _is_flat(fmt, layout, counted)
    if flat:
        layout = Layout(1, 1, layout.outer * layout.rows * layout.columns, along_rows=False)
    by_rows = inside and layout.along_rows
    tile = {"T": fmt.box, **BOX_TILE} if by_rows else TILE
    strips = -(-layout.columns // tile["C"])
    if by_rows:
        programs = layout.outer * -(-layout.rows // fmt.box) * strips
    else:
        programs = -(-layout.outer * layout.rows * strips // tile["T"])
    options = {
        "BOX": fmt.box,
        "ALONG_ROWS": layout.along_rows,
        "INSIDE": inside,
        "FLAT": flat,
        "WIDE": layout.outer * layout.rows * layout.columns >= WIDE,
        **tile,
    }
    if by_rows and counted:  # with the random numbers one warp would spill
        options["num_warps"] = 2
    sizes = (layout.outer * layout.rows, layout.rows, layout.columns)
    return Launch((programs,), sizes, 8 * layout.code_shape(fmt.bits)[1], options)


def holds_boxes(fmt: Format, layout: Layout) -> bool:
    """Whether a tile holds whole boxes."""
    return fmt.box in (BOXES_OF_ROWS if layout.along_rows else BOXES_OF_COLUMNS)


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
    _launch_mask(kernels.pack_mask, count, _mask_values(x_N), bits, count, *limits, **options)
    return bits


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """kernels/reference/stash.py on a GPU."""
    out = torch.empty(count, dtype=dtype, device=bits.device)
    given = bits, _mask_values(out), count, float(closed), float(open)
    _launch_mask(kernels.unpack_mask, count, *given, FLAGS=dtype is torch.bool)
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


def _mask_values(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else integers_for_bfloat16(x)


def relu(x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU, and the mask of the result by the kernel above: two launches."""
    y = torch.nn.functional.relu(x, in_place)
    return y, pack_mask(y.view(-1), 0.0, math.nan, True)
