"""Builds the C++ kernels of the CPU (kernels/cpu/src) into the package; all else is in pyproject.toml.

The result is a plain shared library, called through cffi by kernels/cpu/library.py: it needs neither PyTorch nor
Python's headers, only a C++17 compiler that knows AVX-VNNI (GCC from 11 on, or Clang). Without one the package installs
all the same and runs the reference. In a checkout: ``python setup.py build_ext --inplace``.
"""

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"]
FLAGS += ["-g0", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC warns of its own AVX-512 header
FLAGS += ["-Wno-unknown-warning-option", "-Wno-psabi"]  # Clang: of the one before; of functions it inlines
LINK: list[str] = []  # symbols stay (2 %): profilers name kernels by them
if sanitizers := os.environ.get("DSQ_SANITIZE"):  # .ci/sanitize
    FLAGS += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
    FLAGS.append("-fno-wrapv")  # Python's own flags have signed numbers wrap around, which hides overflows
    LINK = [f"-fsanitize={sanitizers}"]
AVX2 = ["-mavx2", "-mf16c", "-mprfchw"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
#: each source with the flags of its own
SOURCES: dict[str, list[str]] = {
    "api.cpp": [],
    "threads.cpp": [],
    "attention/attention.cpp": [],
    "codec/codec.cpp": [],
    "codec/dispatch.cpp": [],
    "gemm/integer/integer.cpp": [],
    "simd/portable.cpp": [],
    "stash/affine.cpp": [],
    "stash/masks.cpp": [],
}
#: of a kind of machine: a macro for all sources, and sources of its own, whose instructions are chosen at run time: a
#: wheel runs on any such machine
X86 = (
    "-DDSQ_X86",
    {
        "simd/avx2.cpp": AVX2,
        "simd/avx512.cpp": AVX512,
        "gemm/bfloat16.cpp": [*AVX512, "-mavx512bf16"],
        "gemm/integer/avx2.cpp": [*AVX2, "-mfma"],
        "gemm/integer/avxvnni.cpp": [*AVX2, "-mfma", "-mavxvnni"],
        "gemm/integer/avx512.cpp": [*AVX512, "-mavx512vnni"],
        "attention/avx2.cpp": [*AVX2, "-mfma"],
        "attention/avx512.cpp": AVX512,
        "linear.cpp": [],
    },
)
#: beside X86 on Linux, whose permission AMX needs
AMX = {"gemm/amx.cpp": [*AVX512, "-mamx-tile", "-mamx-bf16"], "gemm/amx_emulated.cpp": AVX512}
ARM = "-DDSQ_ARM", {"gemm/integer/neon.cpp": ["-march=armv8.2-a+dotprod"], "linear.cpp": []}
MACHINES = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
# a cross build says its platform in _PYTHON_HOST_PLATFORM; a Mac's universal2 gets what every machine has
platform = sysconfig.get_platform()
if own := MACHINES.get(platform.rpartition("-")[2]):
    FLAGS.append(own[0])
    SOURCES |= own[1]
if platform == "linux-x86_64":
    FLAGS.append("-DDSQ_AMX")
    SOURCES |= AMX
CPU = Path("kernels", "cpu")
SRC = CPU / "src"


class BuildLibrary(build_ext):
    """Compiles each source with flags of its own and links them under a name free of Python's version."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, extension):
        digest = Path(self.build_temp, "abi_digest.cpp")
        digest.parent.mkdir(parents=True, exist_ok=True)
        text = sha256((SRC / "abi.h").read_bytes()).hexdigest()
        digest.write_text(f'#include "api.h"\nconst char* dsq_abi_digest(void) {{ return "{text}"; }}\n')
        sources = {str(digest): [f"-I{SRC}"], **{str(SRC / name): flags for name, flags in SOURCES.items()}}

        def compiled(source):
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=FLAGS + sources[source],
                depends=extension.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [path for paths in pool.map(compiled, sources) for path in paths]
        target = Path(self.get_ext_fullpath(extension.name))
        linked = target.with_suffix(".tmp.so")  # half a library, of a build that was stopped, kills who loads it
        self.compiler.link_shared_object(objects, str(linked), extra_postargs=LINK)
        linked.replace(target)


class PlatformWheel(bdist_wheel):
    """One wheel a platform serves every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "dsq.kernels.cpu._native",
            sources=[str(SRC / name) for name in SOURCES],
            depends=[*map(str, sorted(SRC.rglob("*.h")))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
