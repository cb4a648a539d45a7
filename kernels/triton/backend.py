"""The GPU backend, in Triton.

Importing it imports Triton. With TRITON_INTERPRET=1 in the environment by then, the same launches run the same kernels
on CPU tensors, slowly (that is how they are tested where there is no GPU).
"""

from dataclasses import replace

from dsq.kernels.backend import Backend
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.triton import codec, gemm
from dsq.kernels.triton.linear import Passes

TRITON = replace(  # what follows; the rest, in PyTorch's operations, as the reference does it
    REFERENCE,
    name="triton",
    formats=frozenset(codec.GRIDS),
    blocks=codec.BLOCKS,
    quantize=codec.quantize,
    pack=codec.pack,
    unpack=codec.unpack,
    pack_mask=codec.pack_mask,
    unpack_mask=codec.unpack_mask,
    apply_mask=codec.apply_mask,
    gemms=gemm.GEMMS,
    linear=Passes(),
)


def load() -> Backend:
    """The backend."""
    return TRITON
