"""The GPU backend, in Triton.

Importing this module imports Triton. If TRITON_INTERPRET=1 is in the environment by then, the same launches run the
same kernels on CPU tensors, slowly. The tests do so on machines without a GPU.
"""

from dataclasses import replace

from dsq.kernels.backend import Backend
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.triton import codec, gemm
from dsq.kernels.triton.linear import TritonLinear

TRITON = replace(  # the reference serves the fields that are not listed, by PyTorch's operations
    REFERENCE,
    name="triton",
    formats=frozenset(codec.SCALINGS),
    supports=lambda fmt: fmt.block_size in codec.BLOCKS,
    quantize=codec.quantize,
    pack=codec.pack,
    unpack=codec.unpack,
    pack_mask=codec.pack_mask,
    unpack_mask=codec.unpack_mask,
    apply_mask=codec.apply_mask,
    gemms=gemm.GEMMS,
    linear=TritonLinear(),
)


def load() -> Backend:
    """Return the backend."""
    return TRITON
