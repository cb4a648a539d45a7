"""The CPU backend: the C++ kernels of native/, a plain shared library that setup.py builds beside this file.

The library is called with raw pointers (ctypes) and knows nothing of PyTorch; its threads are those of the OpenMP
runtime that PyTorch has loaded, as many as ``torch.get_num_threads()`` says. The instruction set is chosen at run time.
Where the library was not built, the reference serves the CPU, and a warning says so once.
"""

import ctypes
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .backends import Backend, register_backend
from .grid import Grid, Layout
from .native_layer import NativeLayer
from .native_masks import masks_on
from .native_plan import SEED_MASK, Plan, plan

LIBRARY = Path(__file__).parent / "_native.so"


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SEED, _FLOAT = ctypes.c_uint64, ctypes.c_float
_PACKED = (_POINTER, _POINTER, _INT, _INT)
_SIGNATURES = {
    "dsq_isa": (_INT, ctypes.POINTER(_INT)),
    "dsq_use_threads": (_POINTER, _POINTER),
    "dsq_quantize": (_POINTER, _POINTER, _POINTER, _INT, _SEED),
    "dsq_pack": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _SEED),
    "dsq_unpack": (_POINTER, _POINTER, _POINTER, _POINTER, _INT),
    "dsq_pack_mask": (_INT, _POINTER, _INT, _SIZE, _FLOAT, _FLOAT, _INT, _POINTER, _INT),
    "dsq_unpack_mask": (_INT, _POINTER, _SIZE, _INT, _FLOAT, _FLOAT, _POINTER, _INT),
    "dsq_apply_mask": (_INT, _POINTER, _SIZE, _INT, _POINTER, _POINTER, _INT),
    "dsq_relu": (_INT, _POINTER, _SIZE, _POINTER, _POINTER, _INT),
    "dsq_gemm_bf16": (*[_POINTER, _SIZE, _SIZE] * 2, _POINTER, _POINTER, *[_SIZE] * 3, _POINTER, _INT),
    "dsq_gemm_bf16_scratch": (_SIZE, _SIZE, _SIZE),
    "dsq_gemm_boxes": (*_PACKED, *_PACKED, _INT, _INT, _POINTER, _POINTER, *[_SIZE] * 3, _POINTER, _INT),
    "dsq_gemm_boxes_scratch": (_SIZE, _SIZE, _SIZE, _INT),
    "dsq_layer_forward": (*[_POINTER] * 8, _INT, _SEED),
    "dsq_layer_backward": (*[_POINTER] * 8, _INT, _SEED),
}


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:  # GEMMs are built where the processor family has units for them
            function.argtypes = arguments
            function.restype = ctypes.c_int64 if name.endswith("_scratch") else None
    library.dsq_isa.restype = ctypes.c_char_p
    with suppress(AttributeError):  # PyTorch built without OpenMP: one thread
        # looked up through PyTorch's own dependencies: the OpenMP runtime it uses, whatever its file is called
        runtime = ctypes.CDLL(torch._C.__file__)
        functions = (runtime.GOMP_parallel, runtime.omp_get_thread_num)
        library.dsq_use_threads(*(ctypes.cast(function, _POINTER) for function in functions))
    return library


def has(question: str) -> bool:
    """What the library answers to ``question``, a function of no arguments; no where it is not built."""
    function = getattr(_library, question, None)
    return bool(function and function())


def library() -> ctypes.CDLL:
    """The loaded library."""
    assert _library is not None
    return _library


def instruction_sets() -> dict[str, int]:
    """The instruction sets of this machine that there are kernels for, best first, with their index in the library."""
    found, usable, index = {}, ctypes.c_int(), 0
    while _library is not None and (name := _library.dsq_isa(index, ctypes.byref(usable))):
        if usable.value:
            found[name.decode()] = index
        index += 1
    return found


def backend(isa: str) -> Backend:
    """The native kernels for one instruction set: a key of ``instruction_sets()``."""
    index = instruction_sets()[isa]
    threads = torch.get_num_threads
    run_quantize, run_pack, run_unpack = library().dsq_quantize, library().dsq_pack, library().dsq_unpack

    @lru_cache(maxsize=4096)
    def prepared(
        grid: Grid, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], Plan]:
        """Address of the plan, shapes of codes and of exponents; and the plan, kept alive."""
        made = plan(grid, layout, dtype, out_dtype, stochastic, index)
        return ctypes.addressof(made), layout.code_shape(grid.bits), layout.exponent_shape(grid.box), made

    def quantize(
        x: Tensor, grid: Grid, layout: Layout, seed: int | None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if x.dtype is torch.float64 or dtype is torch.float64:
            return quantize(x.float(), grid, layout, seed, torch.float32).to(dtype)
        if out is None:
            out = torch.empty_like(x, dtype=dtype)
        address = prepared(grid, layout, x.dtype, dtype, seed is not None)[0]
        run_quantize(address, x.data_ptr(), out.data_ptr(), threads(), (seed or 0) & SEED_MASK)
        return out

    def pack(
        x: Tensor, grid: Grid, layout: Layout, seed: int | None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if x.dtype is torch.float64:
            x = x.float()
        address, code_shape, exponent_shape, _ = prepared(grid, layout, x.dtype, x.dtype, seed is not None)
        if out is None:
            made = {"dtype": torch.uint8, "device": "cpu"}  # whatever the defaults are
            out = torch.empty(*code_shape, **made), torch.empty(*exponent_shape, **made)
        codes, exponents = out
        seed = (seed or 0) & SEED_MASK
        run_pack(address, x.data_ptr(), codes.data_ptr(), exponents.data_ptr(), threads(), seed)
        return out

    def unpack(
        codes: Tensor, exponents: Tensor, grid: Grid, layout: Layout, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if dtype is torch.float64:
            return unpack(codes, exponents, grid, layout, torch.float32).to(dtype)
        if out is None:
            out = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device="cpu")
        address = prepared(grid, layout, dtype, dtype, False)[0]
        run_unpack(address, codes.data_ptr(), exponents.data_ptr(), out.data_ptr(), threads())
        return out

    layer = NativeLayer(library(), index) if has("dsq_has_gemm_bf16") or has("dsq_has_gemm_boxes") else None
    return Backend(f"native-{isa}", quantize, pack, unpack, layer, *masks_on(library(), index))


def register() -> None:
    """Let the native kernels serve the CPU; warn where they were not built."""
    if _library is not None:
        register_backend("cpu", backend(next(iter(instruction_sets()))))
        return
    warnings.warn(
        "dsq: the native CPU kernels were not built (no C++ compiler?), so the much slower reference serves the CPU; "
        "in a checkout, build them with: python setup.py build_ext --inplace",
        stacklevel=2,
    )


_library = _load() if LIBRARY.exists() else None
