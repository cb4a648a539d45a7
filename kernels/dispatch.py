"""Which backend serves a tensor, and its codec as the rest of dsq calls it; masks.py and affine.py have the rest.

quantize, pack and unpack take a tensor of FLOATS and any axis for the boxes, and no part in autograd. ``seed`` None
rounds to nearest, ties to even; a number rounds stochastically. Each is a registered operator too (``torch.ops.dsq``),
which is what compilers, modes and tensor subclasses see; a plain tensor goes straight to its backend, as the dispatcher
costs more than a small kernel.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import Parameter

from dsq.formats import Format, Layout, parse_format
from dsq.kernels.backend import FLOATS, Backend, GemmKernel, MatMul, Sizes, check_codes
from dsq.kernels.operators import define
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.tuning import fastest

#: where the backend of a device type is: a module with ``load() -> Backend``, which raises ImportError where it cannot
_MODULES = {"cpu": "dsq.kernels.cpu.backend", "cuda": "dsq.kernels.triton.backend"}
_backends: dict[str, Backend] = {}


def backend_for(device: torch.device) -> Backend:
    """The backend of the device, loaded with the first call; the reference, with a warning, where it does not load."""
    found = _backends.get(device.type)
    return _load(device.type) if found is None else found


def _load(device_type: str) -> Backend:
    backend = REFERENCE
    if device_type in _MODULES:
        try:
            backend = import_module(_MODULES[device_type]).load()
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
    in another order than PyTorch's. Gives whether the kernels serve this machine: a CPU with AVX-512 that is not
    Intel's, whose attention PyTorch multiplies faster (docs/performance.md).
    """
    attention = backend_for(torch.device("cpu")).attention
    with nullcontext() if attention is None else attention():
        yield attention is not None


def codec_for(device: torch.device, fmt: Format) -> Backend:
    """The backend that quantises, packs and unpacks ``fmt`` on the device."""
    backend = backend_for(device)
    return backend if type(fmt) in backend.formats else REFERENCE


@lru_cache(maxsize=4096)
def gemm_for(matmul: MatMul, dtype: torch.dtype, sizes: Sizes, backend: Backend) -> GemmKernel:
    """How ``backend`` multiplies matrices of ``dtype`` and these sizes under ``matmul``."""
    fitting = [gemm for gemm in backend.gemms if gemm.fits(matmul, dtype)]
    if dtype.itemsize < torch.float32.itemsize and len(fitting) > 1:
        fitting.pop()  # PyTorch's, which rounds its sums to the dtype, also those of a gradient that is to be float32
    if 0 in sizes or not backend.tuned:
        return fitting[0]
    return fastest(fitting, matmul, dtype, sizes, backend)


_PLAIN = (Tensor, Parameter)
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
layout_of = lru_cache(maxsize=4096)(Layout.of)  # operators may have symbolic sizes, which no cache takes


def plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel of ``tensors`` may be called past the dispatcher: no compiler, no trace, no mode, no function
    transform and no tensor of a special kind would see the call."""
    special = _compiling() or _tracing() is not None or _dispatch_modes() or _function_transform() is not None
    for x in tensors:
        special = special or (x is not None and (type(x) not in _PLAIN or x.is_neg()))
    return not special


def backend_of(*tensors: Tensor) -> Backend:
    """The backend of the tensors' device; the reference where ``plain`` says no."""
    return backend_for(tensors[0].device) if plain(*tensors) else REFERENCE


def check_types(*dtypes: torch.dtype) -> None:
    """TypeError for a dtype that kernels do not read or write."""
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise TypeError(f"values must be float32, bfloat16, float16 or float64, got {dtype!r}")


def quantize(x: Tensor, fmt: Format, dim: int, seed: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` rounded to the grid of ``fmt`` with boxes along ``dim``, in ``dtype`` (default: that of ``x``)."""
    check_types(x.dtype, dtype or x.dtype)
    if plain(x):
        x = (x.detach() if x.requires_grad else x).contiguous()
        return codec_for(x.device, fmt).quantize(x, fmt, layout_of(x.shape, dim), seed, dtype or x.dtype)
    result: Tensor = torch.ops.dsq.quantize(x.detach(), str(fmt), dim, signed(seed), dtype or x.dtype)
    return result


def pack(x: Tensor, fmt: Format, dim: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x``: uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    check_types(x.dtype)
    if plain(x):
        x = (x.detach() if x.requires_grad else x).contiguous()
        return codec_for(x.device, fmt).pack(x, fmt, layout_of(x.shape, dim), seed)
    codes, scales = torch.ops.dsq.pack(x.detach(), str(fmt), dim, signed(seed))
    return codes, scales


def unpack(codes: Tensor, scales: Tensor, fmt: Format, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Tensor:
    """The values packed in ``codes`` and ``scales``, as a tensor of ``shape`` and ``dtype``."""
    check_types(dtype)
    if plain(codes):
        layout = layout_of(shape, dim)
        check_codes(codes, scales, fmt, layout)
        values = codec_for(codes.device, fmt).unpack(codes.contiguous(), scales.contiguous(), fmt, layout, dtype)
        return values.view(*shape) if shape else values.view(())  # spread out, the sizes parse in half the time
    result: Tensor = torch.ops.dsq.unpack(codes, scales, str(fmt), shape, dim, dtype)
    return result


def signed(seed: int | None) -> int | None:
    """The same 64 bits as an operator takes them: signed."""
    return None if seed is None else (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _quantize(x: Tensor, fmt: str, dim: int, seed: int | None, dtype: torch.dtype) -> Tensor:
    check_types(x.dtype, dtype)
    format, layout = parse_format(fmt), Layout.of(x.shape, dim)
    return codec_for(x.device, format).quantize(x.contiguous(), format, layout, seed, dtype)


def _pack(x: Tensor, fmt: str, dim: int, seed: int | None) -> tuple[Tensor, Tensor]:
    check_types(x.dtype)
    format, layout = parse_format(fmt), Layout.of(x.shape, dim)
    return codec_for(x.device, format).pack(x.contiguous(), format, layout, seed)


def _unpack(codes: Tensor, scales: Tensor, fmt: str, shape: list[int], dim: int, dtype: torch.dtype) -> Tensor:
    check_types(dtype)
    format, layout = parse_format(fmt), Layout.of(tuple(shape), dim)
    check_codes(codes, scales, format, layout)
    values = codec_for(codes.device, format).unpack(codes.contiguous(), scales.contiguous(), format, layout, dtype)
    return values.view(shape)


def _fake_quantize(x: Tensor, fmt: str, dim: int, seed: int | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_pack(x: Tensor, fmt: str, dim: int, seed: int | None) -> tuple[Tensor, Tensor]:
    format, layout = parse_format(fmt), Layout.of(x.shape, dim)
    codes = x.new_empty(layout.code_shape(format.bits), dtype=torch.uint8)
    return codes, x.new_empty(format.scale_shape(layout), dtype=torch.uint8)


def _fake_unpack(codes: Tensor, scales: Tensor, fmt: str, shape: list[int], dim: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


define("quantize(Tensor x, str format, int dim, SymInt? seed, ScalarType dtype) -> Tensor", _quantize, _fake_quantize)
define("pack(Tensor x, str format, int dim, SymInt? seed) -> (Tensor, Tensor)", _pack, _fake_pack)
define(
    "unpack(Tensor codes, Tensor scales, str format, SymInt[] shape, int dim, ScalarType dtype) -> Tensor",
    _unpack,
    _fake_unpack,
)
