"""The GPU backend: launches the kernels of gpu_kernels.

Triton is imported with the first call. With TRITON_INTERPRET=1 in the environment by then, the same launches run the
same kernels on CPU tensors, slowly (that is how they are tested where there is no GPU).
"""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import masks
from .backends import Backend, register_backend
from .grid import BIAS, NAN_EXPONENT, Grid, Layout
from .philox import BLOCK

#: a tile of 32 x 128 values: 16 KiB of float32, eight 16-byte loads a thread
TILE = {"T": 32, "C": BLOCK, "num_warps": 4}
#: boxes along rows: box x 128 values for one warp, a thread holding whole boxes, whose maximum then needs no exchange
BOX_TILE = {"C": BLOCK, "num_warps": 1}
#: a tile holds whole boxes of these lengths, along columns and along rows (more rows would not fit the registers);
#: other boxes have their exponents made first
BOXES_OF_COLUMNS, BOXES_OF_ROWS = (8, 16, 32, 64, 128), (8, 16, 32)
#: boxes a program of box_exponents
BOXES = 512
#: bytes of a mask a program: 8 to 32 bytes of values a thread
MASK = {"B": 256, "num_warps": 4}
#: from here on offsets take 64 bits (a margin below 2**31: a tile may reach beyond the tensor)
WIDE = 1 << 30

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def quantize(x: Tensor, grid: Grid, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    x = x.to(_float(x.dtype))
    y = torch.empty_like(x, dtype=_float(dtype))
    _encode(x, y, None, _exponents_first(x, grid, layout), grid, layout, seed)
    return y.to(dtype)


def pack(x: Tensor, grid: Grid, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and exponents of ``x`` as uint8 tensors of ``layout.code_shape`` and ``layout.exponent_shape``."""
    x = x.to(_float(x.dtype))
    codes = torch.empty(layout.code_shape(grid.bits), dtype=torch.uint8, device=x.device)
    exponents = _exponents_first(x, grid, layout)
    if exponents is None:
        exponents = torch.empty(layout.exponent_shape(grid.box), dtype=torch.uint8, device=x.device)
    _encode(x, None, codes, exponents, grid, layout, seed)
    return codes, exponents


def unpack(codes: Tensor, exponents: Tensor, grid: Grid, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    from .gpu_kernels import decode

    y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=_float(dtype), device=codes.device)
    if y.numel():
        plan = plan_for(grid, layout, counted=False)
        words, word = _words(codes, plan)
        with torch.cuda.device_of(y):
            decode[plan.programs](
                words,
                exponents,
                _integers_for_bfloat16(y),
                *plan.sizes,
                plan.row_bits // word,
                WORD=word,
                **plan.options,
            )
    return y.to(dtype)


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels.masks.pack_mask; float64 goes to PyTorch."""
    if x_N.dtype not in (*_FLOATS, torch.bool):
        return masks.pack_mask(x_N, low, high, nan_is_open)
    from .gpu_mask_kernels import pack_mask as kernel

    count = x_N.numel()
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    if count:
        options = {"FLAGS": x_N.dtype is torch.bool, "NAN_IS_OPEN": nan_is_open, "WIDE": count >= WIDE, **MASK}
        with torch.cuda.device_of(x_N):
            kernel[_mask_programs(bits)](_mask_values(x_N), bits, count, float(low), float(high), **options)
    return bits


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """kernels.masks.unpack_mask; float64 goes to PyTorch."""
    if dtype not in (*_FLOATS, torch.bool):
        return masks.unpack_mask(bits, count, closed, open, dtype)
    from .gpu_mask_kernels import unpack_mask as kernel

    out = torch.empty(count, dtype=dtype, device=bits.device)
    if count:
        options = {"FLAGS": dtype is torch.bool, "WIDE": count >= WIDE, **MASK}
        with torch.cuda.device_of(bits):
            kernel[_mask_programs(bits)](bits, _mask_values(out), count, float(closed), float(open), **options)
    return out


def apply_mask(bits: Tensor, x_N: Tensor) -> Tensor:
    """kernels.masks.apply_mask; float64 goes to PyTorch."""
    if x_N.dtype not in _FLOATS:
        return masks.apply_mask(bits, x_N)
    from .gpu_mask_kernels import apply_mask as kernel

    out, integers = torch.empty_like(x_N), torch.int32 if x_N.dtype is torch.float32 else torch.int16
    if x_N.numel():
        options = {"WIDE": x_N.numel() >= WIDE, **MASK}
        with torch.cuda.device_of(x_N):
            kernel[_mask_programs(bits)](bits, x_N.view(integers), out.view(integers), x_N.numel(), **options)
    return out


TRITON = Backend("triton", quantize, pack, unpack, pack_mask=pack_mask, unpack_mask=unpack_mask, apply_mask=apply_mask)


def register() -> None:
    """Let the Triton kernels serve GPUs, where Triton is installed (else the reference does)."""
    if importlib.util.find_spec("triton") is not None:
        register_backend("cuda", TRITON)


def _encode(
    x: Tensor, y: Tensor | None, codes: Tensor | None, exponents: Tensor | None, grid: Grid, layout: Layout,
    seed: int | None,
) -> None:  # fmt: skip
    """Quantise ``x`` into ``y`` or pack it into ``codes``; ``exponents`` are read where no tile holds a whole box, else
    written with the codes."""
    from .gpu_kernels import encode

    if not x.numel():
        return
    plan = plan_for(grid, layout, counted=seed is not None)
    words, word = (None, 8) if codes is None else _words(codes, plan)
    with torch.cuda.device_of(x):
        encode[plan.programs](
            _integers_for_bfloat16(x), None if y is None else _integers_for_bfloat16(y), words,
            exponents, seed or 0, *plan.sizes, layout.columns, plan.row_bits // word,
            STOCHASTIC=seed is not None, PACK=codes is not None, WORD=word, **plan.options,
        )  # fmt: skip


def _exponents_first(x: Tensor, grid: Grid, layout: Layout) -> Tensor | None:
    """The exponents of boxes that no tile holds; None where the kernel that rounds makes them."""
    from .gpu_kernels import box_exponents

    if holds_boxes(grid, layout):
        return None
    if grid.box == 0:
        return _tensor_exponent(x, grid)
    exponents = torch.empty(layout.exponent_shape(grid.box), dtype=torch.uint8, device=x.device)
    if exponents.numel():
        with torch.cuda.device_of(x):
            box_exponents[(-(-exponents.numel() // BOXES),)](
                _integers_for_bfloat16(x), exponents, exponents.numel(), layout.rows, layout.columns,
                BOX=grid.box, ALONG_ROWS=layout.along_rows, P=BOXES, WIDE=x.numel() >= WIDE,
            )  # fmt: skip
    return exponents


def _tensor_exponent(x: Tensor, grid: Grid) -> Tensor:
    if x.numel():
        largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)
    else:
        largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    stored = largest.view(torch.int32) >> 23
    if grid.exponent is not None:
        stored = torch.where(stored == NAN_EXPONENT, stored, grid.exponent + BIAS)
    return stored.to(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the kernels walk a tensor."""

    programs: tuple[int]
    sizes: tuple[int, int, int]  #: outer * rows, rows, columns
    row_bits: int  #: of codes in a row, padded to a byte
    options: dict[str, int | bool]  #: compile-time arguments


@lru_cache(maxsize=4096)
def plan_for(grid: Grid, layout: Layout, counted: bool) -> _Plan:
    """``counted``: stochastic rounding numbers the values by row and column."""
    inside = holds_boxes(grid, layout)
    flat = _is_flat(grid, layout, counted)
    if flat:
        layout = Layout(1, 1, layout.outer * layout.rows * layout.columns, along_rows=False)
    by_rows = inside and layout.along_rows
    tile = {"T": grid.box, **BOX_TILE} if by_rows else TILE
    strips = -(-layout.columns // tile["C"])
    if by_rows:
        programs = layout.outer * -(-layout.rows // grid.box) * strips
    else:
        programs = -(-layout.outer * layout.rows * strips // tile["T"])
    options = {
        "BITS": grid.bits,
        "BOX": grid.box,
        "ALONG_ROWS": layout.along_rows,
        "INSIDE": inside,
        "FLAT": flat,
        "WIDE": layout.outer * layout.rows * layout.columns >= WIDE,
        **tile,
    }
    sizes = (layout.outer * layout.rows, layout.rows, layout.columns)
    return _Plan((programs,), sizes, 8 * layout.code_shape(grid.bits)[1], options)


def holds_boxes(grid: Grid, layout: Layout) -> bool:
    """Whether a tile holds whole boxes."""
    return grid.box in (BOXES_OF_ROWS if layout.along_rows else BOXES_OF_COLUMNS)


def _is_flat(grid: Grid, layout: Layout, counted: bool) -> bool:
    """Whether the tensor may be taken for one long row, as boxes and bytes (and the blocks of random numbers) end with
    each row: rows of any length then fill the tiles."""
    boxes = grid.box == 0 or (not layout.along_rows and layout.columns % grid.box == 0)
    return boxes and layout.columns * grid.bits % 8 == 0 and (not counted or layout.columns % BLOCK == 0)


def _words(codes: Tensor, plan: _Plan) -> tuple[Tensor, int]:
    """``codes`` as the widest words that hold whole codes and end with the row; and their width in bits."""
    for dtype, bits in ((torch.int32, 32), (torch.int16, 16)):
        aligned = plan.row_bits % bits == 0 and codes.data_ptr() % dtype.itemsize == 0
        if bits % plan.options["BITS"] == 0 and aligned:
            return codes.view(-1).view(dtype), bits
    return codes, 8


def _float(dtype: torch.dtype) -> torch.dtype:
    """The type that a kernel reads or writes for ``dtype``."""
    return dtype if dtype in _FLOATS else torch.float32


def _integers_for_bfloat16(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _mask_programs(bits: Tensor) -> tuple[int]:
    return (-(-bits.numel() // MASK["B"]),)


def _mask_values(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else _integers_for_bfloat16(x)
