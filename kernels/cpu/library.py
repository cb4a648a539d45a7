"""The compiled kernels: a plain shared library that setup.py builds beside this file, called through cffi.

The library takes raw addresses and does not depend on PyTorch. Its threads are those of the OpenMP runtime that PyTorch
has loaded. The instruction set is chosen at run time.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from cffi import FFI

from dsq.kernels.backend import MatMul

HEADER = Path(__file__).parent / "src" / "abi.h"
LIBRARY = Path(
    os.environ.get("DSQ_NATIVE", Path(__file__).parent / "_native.so")
)  # DSQ_NATIVE: a build with sanitizers
Fits = Callable[[MatMul, torch.dtype], bool]
SEED_MASK = (1 << 64) - 1
_REBUILD = "in a checkout, build them with: python setup.py build_ext --inplace"


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """The library, and the types of abi.h. ``c`` has its functions and constants as attributes.

    A call keeps its arguments alive, descriptors among them, but not the memory at an address.
    """

    ffi: FFI
    c: Any
    build: str  #: a checksum of the file

    def new(self, struct: str, fields: dict[str, Any]) -> Any:
        """Return a pointer to a new struct of abi.h, which lives as long as the pointer. Other fields are 0."""
        return self.ffi.new(f"{struct} *", fields)

    def has_gemm(self, kernel: str) -> bool:
        """Return whether this machine has the instructions of a constant of ``enum GemmKernel``."""
        return bool(self.c.dsq_has_gemm(getattr(self.c, kernel)))

    def fits_with(self, kernel: str, fits: Fits) -> Fits:
        """Return ``fits`` of a GemmKernel that runs ``kernel``; one that takes no product without its instructions."""
        return fits if self.has_gemm(kernel) else lambda matmul, dtype: False

    def instruction_sets(self) -> dict[str, int]:
        """Return the instruction sets of this machine that have kernels, best first, with their ``isa``."""
        return self.usable(self.c.dsq_isa)

    def usable(self, name_of: Callable[[int, Any], Any]) -> dict[str, int]:
        """Return the names that ``name_of`` (dsq_isa, dsq_integer_gemm or dsq_attention) gives and this machine can
        run, best first, with their indices."""
        indices: dict[str, int] = {}
        usable = self.ffi.new("int *")
        index = 0
        while name := name_of(index, usable):
            if usable[0]:
                text = self.ffi.string(name)
                assert isinstance(text, bytes)
                indices[text.decode()] = index
            index += 1
        return indices

    def dtypes(self) -> dict[torch.dtype, int]:
        """Return the dtypes that kernels read and write, and their values in ``enum Dtype``."""
        return {torch.float32: self.c.FLOAT32, torch.bfloat16: self.c.BFLOAT16, torch.float16: self.c.FLOAT16}


@cache
def library() -> Library:
    """Return the library, which the first call loads with the threads of PyTorch. Raises the errors of ``load``, and
    warns of a library that is older than its sources."""
    loaded = load(LIBRARY, HEADER)
    if is_older(LIBRARY, HEADER.parent):
        warnings.warn(f"{LIBRARY} is older than the C++ sources; {_REBUILD}", stacklevel=2)
    runtime = FFI()
    runtime.cdef("void GOMP_parallel(void); void omp_get_thread_num(void);")
    with suppress(AttributeError):  # a PyTorch without OpenMP: one thread
        # the lookup through PyTorch's dependencies finds the OpenMP runtime that it uses, whatever the name of its file
        c: Any = runtime.dlopen(torch._C.__file__)
        loaded.c.dsq_use_threads(*(int(runtime.cast("uintptr_t", f)) for f in (c.GOMP_parallel, c.omp_get_thread_num)))
    return loaded


def load(path: Path, header: Path) -> Library:
    """Return the library at ``path``, which must have been built from ``header``.

    Raises ImportError if there is no file, and RuntimeError if it was built from another header or is no library.
    """
    if not path.exists():
        raise ImportError(f"the C++ kernels were not built (no compiler?); {_REBUILD}")
    text = header.read_text(encoding="utf-8")
    ffi = FFI()
    ffi.cdef(text)
    try:
        c: Any = ffi.dlopen(str(path))
    except OSError as error:
        reason = str(error).partition(".  Additionally")[0]  # cffi also names the other places where it looked
        raise RuntimeError(f"the C++ kernels do not load: {reason}; {_REBUILD}") from None
    if ffi.string(c.dsq_abi_digest()) != sha256(text.encode()).hexdigest().encode():
        raise RuntimeError(f"{path} is stale: the C++ kernels were built from another version of abi.h; {_REBUILD}")
    return Library(ffi, c, f"{crc32(path.read_bytes()):08x}")


def is_older(path: Path, sources: Path) -> bool:
    """Return whether a file of the folder ``sources`` is newer than ``path``. abi.h does not count, as ``load`` checks
    its digest; a wheel has no other file."""
    built = path.stat().st_mtime
    return any(source.stat().st_mtime > built for source in sources.rglob("*.*") if source.name != "abi.h")
