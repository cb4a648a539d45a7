"""Block integers with a signed, fractional scale: no code is wasted, and the largest value of a box is nearly exact."""

from dataclasses import dataclass
from typing import ClassVar

from dsq.formats.base import BoxFormat, Law, register
from dsq.formats.bfp import BFP
from dsq.formats.layout import Layout

#: the tensor's exponent is clipped to these, so that no step is subnormal, nor the inverse of one
LOWEST_EXPONENT, HIGHEST_EXPONENT = -90, 120


@register
@dataclass(frozen=True, slots=True)
class SignedNVInt(BoxFormat):
    """NVINT with a signed scale: two's complement codes, an E4M3 scale a box, and an exponent a tensor.

    As in SignedBFP the value of largest magnitude in a box, x_M, takes the negative side, which is one code longer; and
    as in NVFP4 and NVINT4 the scale has a mantissa (3 bits), so that the largest value lies on the grid's end:

        E    = floor(log2 max|x|) over the tensor, clipped to -90..120
        step = -sign(x_M) e4m3(|x_M| / 2^(bits-1) / T) T,   T = 2^(E - bits - 6)

    A scale is a byte, the sign and E4M3; one byte more a tensor holds E + 127. A value has bits + 3 significant bits at
    most, so that bfloat16 holds it up to 5 bits. One NaN or infinity makes the whole tensor NaN. Of two values of the
    same largest magnitude the positive one counts. Raises ValueError for bits or box out of range.
    """

    name: ClassVar[str] = "snvint"
    law: ClassVar[Law] = BFP.law
    signed_scale: ClassVar[bool] = True
    tensor_bytes: ClassVar[int] = 1
    useful_to: ClassVar[int] = 6  # above, the clipping that its rounded scale causes outweighs what it gains

    @property
    def significand_bits(self) -> int:
        return self.bits + 3  # E4M3 has 4, and a code of the largest magnitude is a power of two

    def scale_shape(self, layout: Layout) -> tuple[int, ...]:
        """One a box, and the tensor's last."""
        return (layout.boxes(self.box) + 1,)
