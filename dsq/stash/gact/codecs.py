"""The codes that GACT can allocate bits of: GACT's own per-group quantiser, or block floating point."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dsq.formats import BFP
from dsq.packing import pack
from dsq.stash.saved_tensors.affine import pack_groups
from dsq.stash.saved_tensors.forward_stash import Code

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
    return pack_groups(values_N, bits, group=256, seed=seed)


def _bfp(values_N: Tensor, bits: int, seed: int) -> Code:
    return pack(values_N, BFP(bits), rounding="stochastic", seed=seed)


CODE_FAMILIES = {
    # step = range / (2^b - 1)
    "affine": CodeFamily(_affine, lambda bits: (2.0**bits - 1) ** -2, tuple(range(1, 9))),
    # step = 2^(E - (b - 2))
    "bfp": CodeFamily(_bfp, lambda bits: 4.0 ** (2 - bits), tuple(range(2, 9))),
}
