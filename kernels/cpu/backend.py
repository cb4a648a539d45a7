"""The CPU as a backend: the compiled kernels of one instruction set."""

import torch

from dsq.formats import GridFormat
from dsq.kernels.backend import Backend, GemmKernel
from dsq.kernels.cpu.attention import cpu_attention
from dsq.kernels.cpu.codec import SCALES, CodecKernels, supports
from dsq.kernels.cpu.elements import bfloat16_elements_gemm, elements_gemm
from dsq.kernels.cpu.library import library
from dsq.kernels.cpu.linear import CpuLinear
from dsq.kernels.cpu.products import (
    ONEDNN,
    bfloat16_gemm,
    by_onednn,
    fits_integer,
    multiply_packed,
    with_first_check,
)
from dsq.kernels.reference.backend import TORCH


def load() -> Backend:
    """Return the kernels of the best instruction set of this machine. Raises ImportError if they were not built, and
    RuntimeError if they were built from another abi.h."""
    return backend(next(iter(library().instruction_sets())))


def backend(isa: str) -> Backend:
    """Return the kernels of one instruction set, a key of ``Library.instruction_sets()``."""
    loaded = library()
    index = loaded.instruction_sets()[isa]
    codec = CodecKernels(loaded, index)
    attention_kernels = cpu_attention(loaded)
    fused = loaded.has_gemm("GEMM_BFLOAT16") or loaded.has_gemm("GEMM_INTEGER")
    return Backend(
        name=f"cpu-{isa}",
        formats=frozenset((*SCALES, GridFormat)),
        supports=supports,
        quantize=codec.quantize,
        pack=codec.pack,
        unpack=codec.unpack,
        pack_mask=codec.pack_mask,
        unpack_mask=codec.unpack_mask,
        apply_mask=codec.apply_mask,
        scale_mask=codec.scale_mask,
        bernoulli=codec.bernoulli,
        relu=codec.relu,
        affine_pack=codec.affine_pack,
        affine_unpack=codec.affine_unpack,
        gemms=(
            bfloat16_gemm(loaded, "bfloat16"),
            GemmKernel("integer", loaded.fits_with("GEMM_INTEGER", fits_integer), multiply_packed, packed=True),
            elements_gemm(codec),
            bfloat16_elements_gemm(codec),
            with_first_check(bfloat16_gemm(loaded, "amx")),  # late, so that it is chosen by its time alone
            # PyTorch's, for other products: MKL starts a small one sooner, but on CPUs of other makers than Intel it
            # may leave the widest units idle
            TORCH,
            GemmKernel(
                ONEDNN,
                lambda _, dtype: dtype is torch.float32 and torch.backends.mkldnn.is_available(),
                lambda _, a_MK, b_KN, bias_N: by_onednn(a_MK, b_KN.t(), bias_N),
            ),
        ),
        tuned=True,
        build=loaded.build,
        linear=CpuLinear(codec) if fused else None,
        fused_attention=attention_kernels.serving if attention_kernels else None,
        attention=attention_kernels.result if attention_kernels else None,
        attention_gradients=attention_kernels.gradients if attention_kernels else None,
    )
