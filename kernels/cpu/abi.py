"""The header src/abi.h as cffi reads it. setup.py runs this file by its path, so it needs nothing but cffi."""

from hashlib import sha256
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "src" / "abi.h"


def parse(header: str) -> FFI:
    """The types and functions that the text of a header declares."""
    ffi = FFI()
    ffi.cdef(header)
    return ffi


def digest(header: str) -> str:
    """Return a digest that tells one header from another."""
    return sha256(header.encode()).hexdigest()


def layout(ffi: FFI) -> dict[str, int]:
    """The sizes of all structs and the offsets of their fields, by the C expression for each."""
    numbers: dict[str, int] = {}
    for name in ffi.list_types()[0]:
        struct = ffi.typeof(name)
        if struct.kind == "struct":
            numbers[f"sizeof({name})"] = ffi.sizeof(name)
            numbers |= {f"offsetof({name}, {field})": kind.offset for field, kind in struct.fields or ()}
    return numbers


def table(header: str) -> str:
    """C++ source that gives the header's digest, and the layout as the compiler has it."""
    return (
        '#include <stddef.h>\n#include "api.h"\n'
        f'const char* dsq_abi_digest(void) {{ return "{digest(header)}"; }}\n'
        f"static const int64_t numbers[] = {{{', '.join(layout(parse(header)))}}};\n"
        "const int64_t* dsq_abi_layout(void) { return numbers; }\n"
    )
