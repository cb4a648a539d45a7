"""The choice of a tensor's backend, and the kernels as the rest of dsq calls them.

quantize, pack and unpack take a tensor of FLOATS and any axis for the blocks, and are not differentiable. ``seed`` None
rounds to nearest, ties to even; a number rounds stochastically. Each is also a registered operator (``torch.ops.dsq``),
which compilers, modes and tensor subclasses see. Else the backend is called directly, as the dispatcher
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

#: device type -> the module of its backend, whose ``load() -> Backend`` raises ImportError if the kernels do not load
_MODULES = {"cpu": "dsq.kernels.cpu.backend", "cuda": "dsq.kernels.triton.backend"}
_backends: dict[str, Backend] = {}


def backend_for(device: torch.device) -> Backend:
    """Return the backend of the device, loaded by the first call; with a warning the reference, if it does not load."""
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
    previous = backend_for(torch.device(device_type))
    _backends[device_type] = backend
    try:
        yield
    finally:
        _backends[device_type] = previous


@contextmanager
def fused_attention() -> Iterator[bool]:
    """Let dsq's kernels serve ``F.scaled_dot_product_attention`` on the CPU inside the context, for every model of the
    process. Wrap the training loop, forward and backward.

    The kernels serve float32 and bfloat16, causal or not. PyTorch still serves masks, dropout and fewer heads than
    threads. Sums are float32 in another order than PyTorch's. Yields whether the kernels run on this machine, which
    must have a CPU with AVX2 (docs/performance.md).
    """
    fused = backend_for(torch.device("cpu")).fused_attention
    with nullcontext() if fused is None else fused():
        yield fused is not None


def codec_for(device: torch.device, fmt: Format) -> Backend:
    """Return the backend that quantizes, packs and unpacks ``fmt`` on the device."""
    backend = _backends.get(device.type) or _load(device.type)
    return backend if backend.serves(fmt) else REFERENCE


@lru_cache(maxsize=256)
def gemm_for(matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend) -> GemmKernel:
    """Return the kernel by which ``backend`` multiplies matrices of ``dtype`` and these sizes under ``matmul``."""
    fitting = [gemm for gemm in backend.gemms if gemm.fits(matmul, dtype)]
    if dtype.itemsize < torch.float32.itemsize and len(fitting) > 1:
        # PyTorch's matmul rounds its sums to the dtype, even for a gradient in float32
        fitting = [gemm for gemm in fitting if gemm.name != TORCH.name]
    if 0 in sizes or not backend.tuned:
        return fitting[0]
    return fastest(fitting, matmul, dtype, sizes, backend)


_MASK_DTYPES = frozenset((*DTYPES, torch.bool))
_TENSORS = (Tensor, Parameter)
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
layout_of = lru_cache(maxsize=256)(Layout.of)  # operators may have symbolic sizes, which cannot be cached


def may_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Return whether a kernel of ``tensors`` may be called past the dispatcher: there is no compiler, trace, mode,
    function transform or tensor subclass that must see the call."""
    special = _compiling() or _tracing() is not None or _dispatch_modes() or _function_transform() is not None
    for x in tensors:
        special = special or (x is not None and (type(x) not in _TENSORS or x.is_neg()))
    return not special


def backend_of(dtype: torch.dtype, *tensors: Tensor) -> Backend:
    """Return the backend of the tensors' device; the reference if the dispatcher must see them, or kernels do not take
    ``dtype``."""
    if dtype not in _MASK_DTYPES or not may_bypass_dispatcher(*tensors):
        return REFERENCE
    device_type = tensors[0].device.type
    return _backends.get(device_type) or _load(device_type)


def check_types(*dtypes: torch.dtype) -> None:
    """Raise TypeError for a dtype that kernels do not read or write."""
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise TypeError(f"values must be float32, bfloat16, float16 or float64, got {dtype!r}")


def quantize(x: Tensor, fmt: Format, dim: int, seed: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x`` rounded to the grid of ``fmt`` with blocks along ``dim``, in ``dtype`` (default: that of ``x``)."""
    dtype = dtype or x.dtype
    if may_bypass_dispatcher(x):
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
    """Return the codes and scales of ``x``, uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    if may_bypass_dispatcher(x):
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
    """Return the values packed in ``codes`` and ``scales``, as a tensor of ``shape`` and ``dtype``."""
    if may_bypass_dispatcher(codes):
        return _unpack(codes, scales, fmt, shape, dim, dtype)
    result: Tensor = torch.ops.dsq.unpack(codes, scales, str(fmt), shape, dim, dtype)
    return result


def _unpack(codes: Tensor, scales: Tensor, fmt: Format, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
    if dtype not in FLOATS:
        check_types(dtype)
    layout = layout_of(shape, dim)
    check_codes(codes, scales, fmt, layout)
    kernel_dtype = torch.float32 if dtype is torch.float64 else dtype
    kernels = codec_for(codes.device, fmt)
    values = kernels.unpack(codes.contiguous(), scales.contiguous(), fmt, layout, kernel_dtype).to(dtype)
    return values.view(*shape) if shape else values.view(())  # PyTorch parses *sizes in half the time


def signed(seed: int | None) -> int | None:
    """Return the 64 bits of the seed as a signed number, which operators take."""
    return None if seed is None else (seed + (1 << 63)) % (1 << 64) - (1 << 63)


_library = torch.library.Library("dsq", "DEF")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``torch.ops.dsq.NAME`` for a ``schema`` "NAME(...) -> ...", and its fake, which returns shapes only."""
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
    lambda x, fmt, *args: _quantize(x, parse_format(fmt), *args),
    lambda x, fmt, dim, seed, dtype: x.new_empty(x.shape, dtype=dtype),
)
define(
    "pack(Tensor x, str format, int dim, SymInt? seed) -> (Tensor, Tensor)",
    lambda x, fmt, *args: _pack(x, parse_format(fmt), *args),
    _fake_pack,
)
define(
    "unpack(Tensor codes, Tensor scales, str format, SymInt[] shape, int dim, ScalarType dtype) -> Tensor",
    lambda codes, scales, fmt, shape, *args: _unpack(codes, scales, parse_format(fmt), tuple(shape), *args),
    lambda codes, scales, fmt, shape, dim, dtype: codes.new_empty(shape, dtype=dtype),
)


# ---- masks of one bit a value and affine codes (kernels/reference/stash.py): not operators, as no compiler sees them


def pack_mask(x: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """Return a bit for each value of ``x`` (of FLOATS, or bool), uint8 (ceil(N / 8),).

    The bit is 1 for values above ``low`` and below ``high`` (NaN: no limit), and for NaN if ``nan_is_open``. For bool
    values it is the value.
    """
    return backend_of(x.dtype, x).pack_mask(x.detach().contiguous().view(-1), low, high, nan_is_open)


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the bits as values 0 and 1 of ``dtype`` (of FLOATS), (count,)."""
    check_types(dtype)
    _check_bytes("bits", bits, count)
    return backend_of(dtype, bits).unpack_mask(bits.contiguous(), count, dtype)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` (of FLOATS, any shape) with 0 where the bit is 0."""
    check_types(x.dtype)
    _check_bytes("bits", bits, x.numel())
    if bits.device != x.device:
        raise ValueError(f"bits and x must be on one device, got {bits.device} and {x.device}")
    return backend_of(x.dtype, bits, x).apply_mask(bits.contiguous(), x.detach().contiguous())


def scale_mask(bits: Tensor, x: Tensor, factor: float) -> Tensor:
    """Return ``x`` (of FLOATS, any shape) times ``factor``, a value of its dtype, where the bit is 1, else times 0."""
    check_types(x.dtype)
    _check_bytes("bits", bits, x.numel())
    return backend_of(x.dtype, bits, x).scale_mask(bits.contiguous(), x.detach().contiguous(), factor)


#: draws below which PyTorch's own take less time than copies of the generator's state
_MIN_DRAWS = 256


def bernoulli_mask(x: Tensor, p: float) -> Tensor | None:
    """Return the bits of ``torch.empty_like(x).bernoulli_(p)``, if ``x`` is contiguous and a kernel draws them sooner
    than PyTorch, which draws one at a time on the CPU of most makers; else None."""
    draw = backend_of(x.dtype, x).bernoulli
    return draw(x.numel(), p, True) if draw and x.numel() >= _MIN_DRAWS and x.is_contiguous() else None


def bernoulli(shape: tuple[int, ...], p: float) -> Tensor:
    """Return ``torch.empty(shape).bernoulli_(p)`` on the CPU, as uint8."""
    draw = backend_for(torch.device("cpu")).bernoulli if may_bypass_dispatcher() else None
    count = math.prod(shape)
    draws = draw(count, p, False) if draw and count >= _MIN_DRAWS else None
    if draws is not None:
        return draws.view(shape)
    return torch.empty(shape, dtype=torch.uint8, device="cpu").bernoulli_(p)


def relu(x: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Return PyTorch's ReLU of ``x`` (of FLOATS), and the mask of the result: 1 above 0 and for NaN."""
    backend = backend_of(x.dtype, x)
    if backend.relu is not None and x.dtype is torch.float32 and x.is_contiguous():
        return backend.relu(x, in_place)
    y = F.relu(x, in_place)
    return y, pack_mask(y, 0.0, math.nan, True)


def _check_bytes(name: str, stream: Tensor, bits: int) -> None:
    """Raise ValueError unless ``stream`` is the bytes of so many bits: saved-tensor hooks may return any tensor."""
    if stream.shape != ((bits + 7) // 8,) or stream.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8 ({(bits + 7) // 8},), got {stream.dtype} {tuple(stream.shape)}")


def affine_pack(
    x: Tensor, bits: int, groups: Groups, running: MovingRanges | None = None, seed: int | None = None
) -> AffineCodes:
    """Return codes of 1 to 8 bits of ``x`` (of FLOATS, any shape).

    ``running`` ranges are updated by the values first, in place. None: each group is one run with a range of its own.
    Ranges are float32, or float64 for float64 values.
    """
    check_types(x.dtype)
    range_dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:  # there may be no group
        return AffineCodes(x.new_empty(0, dtype=torch.uint8), x.new_zeros(2, groups.number, dtype=range_dtype))
    assert 1 <= bits <= 8, bits
    if running is None:
        assert groups.number == -(-x.numel() // groups.run), groups
    else:  # a policy's state, which may come from a checkpoint
        ranges = running.alpha_beta
        expected = (2, groups.number), range_dtype, x.device
        if (ranges.shape, ranges.dtype, ranges.device) != expected or not ranges.is_contiguous():
            raise ValueError(
                f"running ranges must be contiguous {range_dtype} {expected[0]} on {x.device}, got {ranges.dtype} "
                f"{tuple(ranges.shape)} on {ranges.device}"
            )
    x = (x.detach() if x.requires_grad else x).contiguous()
    return backend_of(x.dtype, x).affine_pack(x, bits, groups, running, seed)


def affine_unpack(packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
    """Return the values, (count,)."""
    check_types(dtype)
    codes, ranges = packed
    if count == 0:
        return codes.new_empty(0, dtype=dtype)
    _check_bytes("codes", codes, count * bits)
    if ranges.shape != (2, groups.number) or ranges.dtype not in (torch.float32, torch.float64):
        shape = (2, groups.number)
        raise ValueError(f"ranges must be float32 {shape}, got {ranges.dtype} {tuple(ranges.shape)}")
    packed = AffineCodes(codes.contiguous(), ranges.contiguous())
    backend = backend_of(torch.promote_types(dtype, ranges.dtype), codes, ranges)
    return backend.affine_unpack(packed, bits, groups, count, dtype)
