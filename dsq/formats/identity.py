"""No quantisation."""

from dataclasses import dataclass, field
from typing import ClassVar

from dsq.formats.base import WIDEST, Format, Law
from dsq.formats.fixed_point import FixedPoint


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
