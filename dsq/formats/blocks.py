"""Block formats: the values of a box share a scale. BFP is the format of DSQ; the signed ones waste no code."""

from dataclasses import dataclass
from typing import ClassVar

from dsq.formats.base import BoxFormat, Law, Layout, register


@register
@dataclass(frozen=True, slots=True)
class BFP(BoxFormat):
    """Block floating point: along one axis, ``box`` values share one exponent (DSQ, section 4; MX's INT grid).

    With E = max floor(log2|x|) over the box, the step is ``2**(E - (bits - 2))`` and the largest code
    ``2**(bits - 1) - 1``. Raises ValueError for bits or box out of range.
    """

    name: ClassVar[str] = "bfp"
    #: from the two all-equal BFP rows of the paper's table 1
    law: ClassVar[Law] = Law(
        0.56 / 32 ** (2 * 0.82),
        0.82,
        "table 1's BFP [32,32,32,32] 0.56x and [16,16,16,16] 0.18x; p = ln(0.56/0.18)/ln 4 to two digits",
    )


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
    #: the lowest and the highest that the 7 bits of a scale hold; NaN takes the code after
    exponents: ClassVar[tuple[int, int]] = (-96, 30)


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
    #: the tensor's exponent is clipped to these, so that no step is subnormal, nor the inverse of one
    exponents: ClassVar[tuple[int, int]] = (-90, 120)
    useful_to: ClassVar[int] = 6  # above, the clipping that its rounded scale causes outweighs what it gains

    @property
    def significand_bits(self) -> int:
        return self.bits + 3  # E4M3 has 4, and a code of the largest magnitude is a power of two

    def scale_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of one scale a box, and the tensor's last."""
        return (layout.boxes(self.box) + 1,)
