"""The kernels as registered PyTorch operators (dsq::quantize, dsq::pack, dsq::unpack), with fake implementations.

The functions here are what the rest of dsq calls: a tensor of FLOATS in, any axis for the boxes; they take no part in
autograd. ``seed`` None rounds to nearest, ties to even; a number rounds stochastically.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from . import masks
from .backends import backend_for
from .grid import Grid, Layout

#: what kernels read and write
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))

_library = torch.library.Library("dsq", "DEF")


def define(schema: str, implementation: Callable, fake: Callable) -> None:
    """Register ``torch.ops.dsq.NAME`` for a ``schema`` "NAME(...) -> ...", and its fake, which gives shapes only."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsq::{name}", fake, lib=_library)


_PLAIN = (Tensor, Parameter)
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
_layout_of = lru_cache(maxsize=4096)(Layout.of)


def plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel of ``tensors`` may be called as it is, past the dispatcher, which costs more than a small
    kernel: no compiler, no trace, no mode, no function transform and no tensor of a special kind would see the call."""
    special = _compiling() or _tracing() is not None or _dispatch_modes() or _function_transform() is not None
    for x in tensors:
        special = special or (x is not None and (type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor()))
    return not special


def quantize(x: Tensor, grid: Grid, dim: int, seed: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` rounded to ``grid`` with boxes along ``dim``; same shape, in ``dtype`` (default: that of ``x``)."""
    _check_types(x.dtype, dtype or x.dtype)
    if plain(x):
        x = (x.detach() if x.requires_grad else x).contiguous()
        return backend_for(x.device).quantize(x, grid, _layout_of(x.shape, dim), seed, dtype or x.dtype)
    return torch.ops.dsq.quantize(x.detach(), grid.bits, grid.box, grid.exponent, dim, _int64(seed), dtype or x.dtype)


def pack(x: Tensor, grid: Grid, dim: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and exponents of ``x``: uint8 tensors of the shapes that ``Layout`` gives."""
    _check_types(x.dtype)
    if plain(x):
        x = (x.detach() if x.requires_grad else x).contiguous()
        return backend_for(x.device).pack(x, grid, _layout_of(x.shape, dim), seed)
    return torch.ops.dsq.pack(x.detach(), grid.bits, grid.box, grid.exponent, dim, _int64(seed))


def unpack(
    codes: Tensor, exponents: Tensor, grid: Grid, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> Tensor:
    """The values packed in ``codes`` and ``exponents``, as a tensor of ``shape`` and ``dtype``."""
    _check_types(dtype)
    if plain(codes):
        layout = _layout_of(shape, dim)
        check_codes(codes, exponents, grid, layout)
        values = backend_for(codes.device).unpack(codes.contiguous(), exponents.contiguous(), grid, layout, dtype)
        return values.view(*shape) if shape else values.view(())  # spread out, the sizes parse in half the time
    return torch.ops.dsq.unpack(codes, exponents, grid.bits, grid.box, grid.exponent, shape, dim, dtype)


def _check_types(*dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise TypeError(f"values must be float32, bfloat16, float16 or float64, got {dtype}")


def check_codes(codes: Tensor, exponents: Tensor, grid: Grid, layout: Layout) -> None:
    """ValueError where they are not those of a tensor of this layout: kernels read memory as these say."""
    shapes = layout.code_shape(grid.bits), layout.exponent_shape(grid.box)
    if codes.device != exponents.device:
        raise ValueError(f"codes and exponents must be on one device, got {codes.device} and {exponents.device}")
    if (codes.shape, exponents.shape) != shapes or codes.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ValueError(
            f"codes and exponents must be uint8 of shapes {shapes[0]} and {shapes[1]}, got "
            f"{codes.dtype} {tuple(codes.shape)} and {exponents.dtype} {tuple(exponents.shape)}"
        )


def pack_mask(x: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """A bit for each value of ``x`` (of FLOATS, or bool), uint8 (ceil(N / 8),): see kernels.masks.

    For what saved-tensor hooks keep, which no compiler sees: not an operator.
    """
    pack = backend_for(x.device).pack_mask if plain(x) else masks.pack_mask
    return pack(x.detach().contiguous().view(-1), low, high, nan_is_open)


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """``count`` values of ``dtype``, (count,): ``open`` where the bit is 1, else ``closed``."""
    if bits.shape != ((count + 7) // 8,) or bits.dtype != torch.uint8:
        raise ValueError(f"bits must be uint8 ({(count + 7) // 8},), got {bits.dtype} {tuple(bits.shape)}")
    unpack = backend_for(bits.device).unpack_mask if plain(bits) else masks.unpack_mask
    return unpack(bits.contiguous(), count, closed, open, dtype)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """``x`` (of FLOATS, any shape) where the bit is 1, else 0."""
    _check_types(x.dtype)
    count = x.numel()
    if bits.shape != ((count + 7) // 8,) or bits.dtype != torch.uint8 or bits.device != x.device:
        raise ValueError(
            f"bits must be uint8 ({(count + 7) // 8},) on {x.device}, got {bits.dtype} {tuple(bits.shape)} on "
            f"{bits.device}"
        )
    apply = backend_for(x.device).apply_mask if plain(bits, x) else masks.apply_mask
    return apply(bits.contiguous(), x.detach().contiguous())


def relu(x: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU of ``x`` (of FLOATS, contiguous), and the mask of the result: above 0, or NaN."""
    run = backend_for(x.device).relu if x.dtype is torch.float32 and plain(x) else None
    if run is not None and x.is_contiguous():
        return run(x, in_place)
    y = F.relu(x, in_place)
    return y, pack_mask(y, 0.0, math.nan, True)


def _int64(seed: int | None) -> int | None:
    """The same 64 bits as an operator takes them: signed."""
    return None if seed is None else (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _quantize(x, bits, box, exponent, dim, seed, dtype):
    grid, layout = Grid(bits, box, exponent), Layout.of(x.shape, dim)
    return backend_for(x.device).quantize(x.contiguous(), grid, layout, seed, dtype)


def _pack(x, bits, box, exponent, dim, seed):
    grid, layout = Grid(bits, box, exponent), Layout.of(x.shape, dim)
    return backend_for(x.device).pack(x.contiguous(), grid, layout, seed)


def _unpack(codes, exponents, bits, box, exponent, shape, dim, dtype):
    grid, layout = Grid(bits, box, exponent), Layout.of(shape, dim)
    check_codes(codes, exponents, grid, layout)
    return backend_for(codes.device).unpack(codes.contiguous(), exponents.contiguous(), grid, layout, dtype).view(shape)


def _fake_quantize(x, bits, box, exponent, dim, seed, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _fake_pack(x, bits, box, exponent, dim, seed):
    layout = Layout.of(x.shape, dim)
    codes = x.new_empty(layout.code_shape(bits), dtype=torch.uint8)
    return codes, x.new_empty(layout.exponent_shape(box), dtype=torch.uint8)


def _fake_unpack(codes, exponents, bits, box, exponent, shape, dim, dtype):
    return codes.new_empty(shape, dtype=dtype)


_GRID = "int bits, int box, int? exponent"
define(f"quantize(Tensor x, {_GRID}, int dim, int? seed, ScalarType dtype) -> Tensor", _quantize, _fake_quantize)
define(f"pack(Tensor x, {_GRID}, int dim, int? seed) -> (Tensor, Tensor)", _pack, _fake_pack)
define(
    f"unpack(Tensor codes, Tensor exponents, {_GRID}, SymInt[] shape, int dim, ScalarType dtype) -> Tensor",
    _unpack,
    _fake_unpack,
)
