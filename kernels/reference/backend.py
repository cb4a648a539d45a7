"""The reference as a backend: plain PyTorch on any device, every format, sums in float64."""

from dsq.formats import FORMATS
from dsq.kernels.backend import Backend
from dsq.kernels.reference import affine, codec, masks
from dsq.kernels.reference.gemm import FLOAT64

REFERENCE = Backend(
    name="reference",
    formats=frozenset(FORMATS.values()),
    quantize=codec.quantize,
    pack=codec.pack,
    unpack=codec.unpack,
    pack_mask=masks.pack_mask,
    unpack_mask=masks.unpack_mask,
    apply_mask=masks.apply_mask,
    relu=masks.relu,
    affine_pack=affine.pack,
    affine_unpack=affine.unpack,
    gemms=(FLOAT64,),
)
