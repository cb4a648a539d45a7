"""The codes that GACT can allocate bits of: GACT's own per-group quantiser, or a block format."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsq.formats import FORMATS, Format, named
from dsq.formats.base import BoxFormat
from dsq.kernels.backend import Groups
from dsq.kernels.dispatch import affine_pack, pack
from dsq.packing import quantize
from dsq.stash.codes import Code, UnpackAffine, UnpackBoxes

_GROUP = 256  #: values that share a low and a step
EXACT = 32  #: the width that stands for "kept as it is"


@dataclass(frozen=True)
class CodeFamily:
    """A family of codes by bits a value, rounded stochastically."""

    #: (N,) values, bits, seed -> code
    encode: Callable[[Tensor, int, int], Code]
    #: S(b): how the variance of the rounding depends on the bits (assumption B2 of GACT)
    factor: Callable[[int], float]
    #: the widths it has, narrowest first
    widths: tuple[int, ...]


def _affine(values_N: Tensor, bits: int, seed: int) -> Code:
    """GACT's quantiser (appendix A.4): q = floor((x - low) / step + u), step = (max - min) / (2^b - 1), by groups."""
    groups = Groups(_GROUP, -(-values_N.numel() // _GROUP))
    return tuple(affine_pack(values_N, bits, groups, None, seed)), UnpackAffine(bits, groups, values_N.numel())


def _boxes(name: str) -> CodeFamily:
    """A block format in boxes of 16."""
    formats = {bits: named(name, bits) for bits in range(2, 9)}

    def encode(values_N: Tensor, bits: int, seed: int) -> Code:
        return pack(values_N, formats[bits], 0, seed), UnpackBoxes(formats[bits], (values_N.numel(),))

    return CodeFamily(encode, lambda bits: _variance(formats[bits]), tuple(formats))


@cache
def _variance(fmt: Format) -> float:
    """Variance of rounding normal values to ``fmt``, from two roundings.

    No law holds for all formats and widths: another bit does not halve sbfp's step, snvint is bfp above 6 bits, and at
    2 bits, where most values are less than a step, the variance is less than the step's square says.
    """
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0), device="cpu")
    first, second = (quantize(x, fmt, rounding="stochastic", seed=seed) for seed in (0, 1))
    return 0.5 * float((first - second).square().mean())


CODE_FAMILIES = {
    # step = range / (2^b - 1)
    "affine": CodeFamily(_affine, lambda bits: (2.0**bits - 1) ** -2, tuple(range(1, 9))),
    **{name: _boxes(name) for name, kind in FORMATS.items() if issubclass(kind, BoxFormat)},
}
