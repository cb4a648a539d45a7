"""Formats without boxes: fixed point, the paper's baseline, and no quantisation."""

from dataclasses import dataclass, field
from typing import ClassVar

from dsq.arguments import whole_number
from dsq.formats.base import WIDEST, Format, Law, register

#: the exponent of a value's step is stored in 8 bits, biased by this, so it spans -BIAS .. 254 - BIAS
BIAS = 127


@register
@dataclass(frozen=True, slots=True)
class FixedPoint(Format):
    """Fixed point: one binary point for the whole tensor.

    ``fraction_bits`` None places it by the tensor's largest value (dynamic: the grid of BFP with one box); a number
    leaves it there for good (static: step ``2**-fraction_bits``, values beyond the range are clipped). The paper does
    not say which it takes; six bits that stay come nearest to its rows (docs/results.md). Raises ValueError for bits or
    fraction bits out of range.
    """

    name: ClassVar[str] = "fixed"
    law: ClassVar[Law] = Law(
        1 / 32**2,
        1.0,
        "array multiplier: one cell for each pair of operand bits; table 1's 16x16 row, 0.25 = (16*16)/(32*32)",
    )

    fraction_bits: int | None = None  #: the static binary point; None: placed by the largest value

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        if self.fraction_bits is not None:  # the exponent has to be one that is stored
            low, high = self.bits - 2 - BIAS, self.bits - 2 + BIAS
            object.__setattr__(self, "fraction_bits", whole_number("fraction_bits", self.fraction_bits, low, high))

    @property
    def static_exponent(self) -> int | None:
        """Return the exponent E of the largest values, where it does not follow them."""
        return None if self.fraction_bits is None else self.bits - 2 - self.fraction_bits


@dataclass(frozen=True, slots=True)
class Identity(Format):
    """Values as they are, in a floating type of ``bits`` bits."""

    name: ClassVar[str] = "float"
    law: ClassVar[Law] = FixedPoint.law  #: of the significands

    bits: int = field(default=WIDEST, repr=False)  #: 16 or 32, as of the types float16 and float32

    @property
    def packs(self) -> bool:
        return False

    @property
    def significand_bits(self) -> int:
        return 24 if self.bits > 16 else min(self.bits, 11)

    @property
    def multiplier_bits(self) -> int:
        return self.significand_bits
