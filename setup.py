"""Builds the native CPU kernels (kernels/native) into the package; all else is in pyproject.toml.

The result is a plain shared library, loaded by kernels/native.py with ctypes: it needs neither PyTorch nor Python's
headers, only a C++17 compiler (GCC or Clang). Without one the package installs all the same and runs the reference.
In a checkout: ``python setup.py build_ext --inplace``.
"""

import glob
import os
import platform
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"]
FLAGS += ["-g0", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC warns of its own AVX-512 header
SOURCES = {"api.cpp": [], "portable.cpp": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    FLAGS.append("-DDSQ_X86")
    # chosen at run time, so a wheel runs on any x86-64 machine
    SOURCES["avx2.cpp"] = ["-mavx2", "-mf16c", "-mprfchw"]
    AVX512 = ["-mavx2", "-mf16c", "-mprfchw", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    SOURCES["avx512.cpp"] = AVX512
    SOURCES["gemm_bf16.cpp"] = [*AVX512, "-mavx512bf16"]
    SOURCES["gemm_boxes.cpp"] = [*AVX512, "-mavx512vnni"]
    SOURCES["layer.cpp"] = []


class BuildLibrary(build_ext):
    """Compiles each source with flags of its own and links them under a name free of Python's version."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, extension):
        def compiled(source):
            flags = FLAGS + SOURCES[os.path.basename(source)]
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=extension.depends
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [made for objects in pool.map(compiled, extension.sources) for made in objects]
        target = self.get_ext_fullpath(extension.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-s"])


class PlatformWheel(bdist_wheel):
    """One wheel a platform serves every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


NATIVE = os.path.join("kernels", "native")
setup(
    ext_modules=[
        Extension(
            "dsq.kernels._native",
            sources=[os.path.join(NATIVE, name) for name in SOURCES],
            depends=sorted(glob.glob(os.path.join(NATIVE, "*.h"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
