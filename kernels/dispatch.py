"""Which backend serves a tensor, and its kernels as the rest of dsq calls them.

quantize, pack and unpack take a tensor of FLOATS and any axis for the blocks, and no part in autograd. ``seed`` None
rounds to nearest, ties to even; a number rounds stochastically. Each is a registered operator too (``torch.ops.dsq``),
which is what compilers, modes and tensor subclasses see; a plain tensor goes straight to its backend, as the dispatcher
costs more than a small kernel.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dsq.formats import Format, Layout, parse_format
from dsq.kernels.backend import (
    DTYPES,
    FLOATS,
    AffineCodes,
    Backend,
    GemmKernel,
    Groups,
    MatMul,
    MovingRanges,
    Sizes,
    check_codes,
)
from dsq.kernels.reference.backend import REFERENCE, TORCH
from dsq.kernels.tuning import fastest

#: where the backend of a device type is: a module with ``load() -> Backend``, which raises ImportError where it cannot
_MODULES = {"cpu": "dsq.kernels.cpu.backend", "cuda": "dsq.kernels.triton.backend"}
_backends: dict[str, Backend] = {}


def backend_for(device: torch.device) -> Backend:
    """The backend of the device, loaded with the first call; the reference, with a warning, where it does not load."""
    return _backends.get(device.type) or _load(device.type)


def _load(device_type: str) -> Backend:
    backend = REFERENCE
    try:
        if device_type in _MODULES:
            backend = import_module(_MODULES[device_type]).load()
        elif device_type == "mps":
            raise RuntimeError("dsq has no kernels for 'mps', which lacks the reference's float64: use device 'cpu'")
        elif device_type != "meta":
            raise ImportError("there are no kernels for it")
    except ImportError as error:
        warnings.warn(f"dsq: the much slower reference serves {device_type!r}: {error}", stacklevel=3)
    return _backends.setdefault(device_type, backend)


def register_backend(device_type: str, backend: Backend) -> None:
    """Let ``backend`` serve tensors whose ``device.type`` is ``device_type``."""
    _backends[device_type] = backend


@contextmanager
def use_backend(backend: Backend, device_type: str = "cpu") -> Iterator[None]:
    """Serve ``device_type`` with ``backend`` inside the context (tests, benchmarks)."""
    before = backend_for(torch.device(device_type))
    _backends[device_type] = backend
    try:
        yield
    finally:
        _backends[device_type] = before


@contextmanager
def fused_attention() -> Iterator[bool]:
    """While inside, ``F.scaled_dot_product_attention`` on the CPU by dsq's kernels, for every model of the process:
    wrap the training loop, forward and backward.

    In float32 and bfloat16, causal or not; masks, dropout and fewer heads than threads stay PyTorch's. Sums are float32
    in another order than PyTorch's. Gives whether the kernels serve this machine: a CPU with AVX2
    (docs/performance.md).
    """
    fused = backend_for(torch.device("cpu")).fused_attention
    with nullcontext() if fused is None else fused():
        yield fused is not None


def codec_for(device: torch.device, fmt: Format) -> Backend:
    """The backend that quantizes, packs and unpacks ``fmt`` on the device."""
    backend = _backends.get(device.type) or _load(device.type)
    return backend if backend.serves(fmt) else REFERENCE


@lru_cache(maxsize=256)
def gemm_for(matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend) -> GemmKernel:
    """How ``backend`` multiplies matrices of ``dtype`` and these sizes under ``matmul``."""
    fitting = [gemm for gemm in backend.gemms if gemm.fits(matmul, dtype)]
    if dtype.itemsize < torch.float32.itemsize and len(fitting) > 1:
        # PyTorch's rounds its sums to the dtype, also those of a gradient that is to be float32
        fitting = [gemm for gemm in fitting if gemm.name != TORCH.name]
    if 0 in sizes or not backend.tuned:
        return fitting[0]
    return fastest(fitting, matmul, dtype, sizes, backend)


_OF_MASKS = frozenset((*DTYPES, torch.bool))
_PLAIN = (Tensor, Parameter)
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
layout_of = lru_cache(maxsize=256)(Layout.of)  # operators may have symbolic sizes, which no cache takes


def plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel of ``tensors`` may be called past the dispatcher: no compiler, no trace, no mode, no function
    transform and no tensor of a special kind would see the call."""
    special = _compiling() or _tracing() is not None or _dispatch_modes() or _function_transform() is not None
    for x in tensors:
        special = special or (x is not None and (type(x) not in _PLAIN or x.is_neg()))
    return not special


def backend_of(dtype: torch.dtype, *tensors: Tensor) -> Backend:
    """The backend of the tensors' device; the reference where ``plain`` says no, or kernels have no values of
    ``dtype``."""
    if dtype not in _OF_MASKS or not plain(*tensors):
        return REFERENCE
    device_type = tensors[0].device.type
    return _backends.get(device_type) or _load(device_type)


def check_types(*dtypes: torch.dtype) -> None:
    """TypeError for a dtype that kernels do not read or write."""
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise TypeError(f"values must be float32, bfloat16, float16 or float64, got {dtype!r}")


def quantize(x: Tensor, fmt: Format, dim: int, seed: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` rounded to the grid of ``fmt`` with blocks along ``dim``, in ``dtype`` (default: that of ``x``)."""
    dtype = dtype or x.dtype
    if plain(x):
        return _quantize(x, fmt, dim, seed, dtype)
    result: Tensor = torch.ops.dsq.quantize(x.detach(), str(fmt), dim, signed(seed), dtype)
    return result


def _quantize(x: Tensor, fmt: Format, dim: int, seed: int | None, dtype: torch.dtype) -> Tensor:
    check_types(x.dtype, dtype)
    if torch.float64 in (x.dtype, dtype):
        return _quantize(x.float(), fmt, dim, seed, torch.float32).to(dtype)
    x = (x.detach() if x.requires_grad else x).contiguous()
    return codec_for(x.device, fmt).quantize(x, fmt, layout_of(x.shape, dim), seed, dtype)


def pack(x: Tensor, fmt: Format, dim: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x``: uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    if plain(x):
        return _pack(x, fmt, dim, seed)
    codes, scales = torch.ops.dsq.pack(x.detach(), str(fmt), dim, signed(seed))
    return codes, scales


def _pack(x: Tensor, fmt: Format, dim: int, seed: int | None) -> tuple[Tensor, Tensor]:
    if x.dtype not in FLOATS:
        check_types(x.dtype)
    x = x.float() if x.dtype is torch.float64 else x
    x = (x.detach() if x.requires_grad else x).contiguous()
    return codec_for(x.device, fmt).pack(x, fmt, layout_of(x.shape, dim), seed)


def unpack(codes: Tensor, scales: Tensor, fmt: Format, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
    """The values packed in ``codes`` and ``scales``, as a tensor of ``shape`` and ``dtype``."""
    if plain(codes):
        return _unpack(codes, scales, fmt, shape, dim, dtype)
    result: Tensor = torch.ops.dsq.unpack(codes, scales, str(fmt), shape, dim, dtype)
    return result


def _unpack(codes: Tensor, scales: Tensor, fmt: Format, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
    if dtype not in FLOATS:
        check_types(dtype)
    layout = layout_of(shape, dim)
    check_codes(codes, scales, fmt, layout)
    kernels, out = codec_for(codes.device, fmt), torch.float32 if dtype is torch.float64 else dtype
    values = kernels.unpack(codes.contiguous(), scales.contiguous(), fmt, layout, out).to(dtype)
    return values.view(*shape) if shape else values.view(())  # spread out, the sizes parse in half the time


def signed(seed: int | None) -> int | None:
    """Return the 64 bits of the seed as a signed number, which operators take."""
    return None if seed is None else (seed + (1 << 63)) % (1 << 64) - (1 << 63)


_library = torch.library.Library("dsq", "DEF")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``torch.ops.dsq.NAME`` for a ``schema`` "NAME(...) -> ...", and its fake, which gives shapes only."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsq::{name}", fake, lib=_library)


def _fake_pack(x: Tensor, fmt: str, dim: int, seed: int | None) -> tuple[Tensor, Tensor]:
    format, layout = parse_format(fmt), Layout.of(x.shape, dim)
    codes = x.new_empty(layout.code_shape(format.bits), dtype=torch.uint8)
    return codes, x.new_empty(format.scale_shape(layout), dtype=torch.uint8)


define(
    "quantize(Tensor x, str format, int dim, SymInt? seed, ScalarType dtype) -> Tensor",
    lambda x, fmt, *rest: _quantize(x, parse_format(fmt), *rest),
    lambda x, fmt, dim, seed, dtype: x.new_empty(x.shape, dtype=dtype),
)
define(
    "pack(Tensor x, str format, int dim, SymInt? seed) -> (Tensor, Tensor)",
    lambda x, fmt, *rest: _pack(x, parse_format(fmt), *rest),
    _fake_pack,
)
define(
    "unpack(Tensor codes, Tensor scales, str format, SymInt[] shape, int dim, ScalarType dtype) -> Tensor",
    lambda codes, scales, fmt, shape, *rest: _unpack(codes, scales, parse_format(fmt), tuple(shape), *rest),
    lambda codes, scales, fmt, shape, dim, dtype: codes.new_empty(shape, dtype=dtype),
)


# ---- masks of one bit a value and affine codes (kernels/reference/stash.py): no operators, as no compiler sees them


def pack_mask(x: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """A bit for each value of ``x`` (of FLOATS, or bool), uint8 (ceil(N / 8),): 1 for those above ``low`` and below
    ``high`` (NaN: no limit), and for NaN if ``nan_is_open``; of bool values for those that are true.
    """
    return backend_of(x.dtype, x).pack_mask(x.detach().contiguous().view(-1), low, high, nan_is_open)


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The bits as ``count`` values 0 and 1 of ``dtype`` (of FLOATS), (count,)."""
    check_types(dtype)
    _check_bytes("bits", bits, count)
    return backend_of(dtype, bits).unpack_mask(bits.contiguous(), count, dtype)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """``x`` (of FLOATS, any shape) where the bit is 1, else 0."""
    check_types(x.dtype)
    _check_bytes("bits", bits, x.numel())
    if bits.device != x.device:
        raise ValueError(f"bits and x must be on one device, got {bits.device} and {x.device}")
    return backend_of(x.dtype, bits, x).apply_mask(bits.contiguous(), x.detach().contiguous())


def relu(x: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU of ``x`` (of FLOATS), and the mask of the result: above 0, or NaN."""
    backend = backend_of(x.dtype, x)
    if backend.relu is not None and x.dtype is torch.float32 and x.is_contiguous():
        return backend.relu(x, in_place)
    y = F.relu(x, in_place)
    return y, pack_mask(y, 0.0, math.nan, True)


def _check_bytes(name: str, stream: Tensor, bits: int) -> None:
    """Raise ValueError for what is not the bytes of so many bits: saved-tensor hooks may give back anything."""
    if stream.shape != ((bits + 7) // 8,) or stream.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8 ({(bits + 7) // 8},), got {stream.dtype} {tuple(stream.shape)}")


def affine_pack(
    x: Tensor, bits: int, groups: Groups, running: MovingRanges | None = None, seed: int | None = None
) -> AffineCodes:
    """Codes of 1 to 8 bits of ``x`` (of FLOATS, any shape), in running ranges, which are moved by the values first, in
    place; None: each group is one run, in its own range. Ranges are float32, or float64 for float64 values.
    """
    check_types(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:  # of no group, perhaps
        return AffineCodes(x.new_empty(0, dtype=torch.uint8), x.new_zeros(2, groups.number, dtype=wide))
    assert 1 <= bits <= 8, bits
    if running is None:
        assert groups.number == -(-x.numel() // groups.run), groups
    else:  # a policy's state, which a checkpoint may hold
        ranges, wanted = running.alpha_beta, ((2, groups.number), wide, x.device)
        if (ranges.shape, ranges.dtype, ranges.device) != wanted or not ranges.is_contiguous():
            raise ValueError(
                f"running ranges must be contiguous {wide} {wanted[0]} on {x.device}, got {ranges.dtype} "
                f"{tuple(ranges.shape)} on {ranges.device}"
            )
    x = (x.detach() if x.requires_grad else x).contiguous()
    return backend_of(x.dtype, x).affine_pack(x, bits, groups, running, seed)


def affine_unpack(packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
    """The ``count`` values, (count,)."""
    check_types(dtype)
    codes, ranges = packed
    if count == 0:
        return codes.new_empty(0, dtype=dtype)
    _check_bytes("codes", codes, count * bits)
    if ranges.shape != (2, groups.number) or ranges.dtype not in (torch.float32, torch.float64):
        shape = (2, groups.number)
        raise ValueError(f"ranges must be float32 {shape}, got {ranges.dtype} {tuple(ranges.shape)}")
    contiguous, wide = AffineCodes(codes.contiguous(), ranges.contiguous()), torch.promote_types(dtype, ranges.dtype)
    return backend_of(wide, codes, ranges).affine_unpack(contiguous, bits, groups, count, dtype)
