"""Block floating point whose scale has a sign, so that no code is wasted."""

from dataclasses import dataclass
from typing import ClassVar

from dsq.formats.base import BoxFormat, Law, register
from dsq.formats.bfp import BFP

#: the smallest and the largest exponent that the 7 bits of a scale hold; NaN takes the code after
LOWEST_EXPONENT, HIGHEST_EXPONENT = -96, 30


@register
@dataclass(frozen=True, slots=True)
class SignedBFP(BoxFormat):
    """Block floating point with a signed scale: the codes are all of two's complement, -2^(bits-1)..2^(bits-1) - 1.

    BFP never uses -2^(bits-1): at 2 bits a quarter of the codes. Here the value of largest magnitude in a box, x_M,
    takes the negative side, which is one code longer, by the sign of the box's step:

        step = -sign(x_M) 2^(E - (bits - 2)),   E = floor(log2(|x_M| / (1 + 2^(1-bits))))

    A scale is a byte: the step's sign and E in 7 bits, clipped to -96..30. Of two values of the same largest magnitude
    the positive one counts. Raises ValueError for bits or box out of range.
    """

    name: ClassVar[str] = "sbfp"
    law: ClassVar[Law] = BFP.law
    signed_scale: ClassVar[bool] = True
    useful_to: ClassVar[int] = 8
