"""Block floating point, the format of DSQ (section 4)."""

from dataclasses import dataclass
from typing import ClassVar

from dsq.arguments import whole_number
from dsq.formats.base import SCALE_BITS, BoxFormat, Law, register


@register
@dataclass(frozen=True, slots=True)
class BFP(BoxFormat):
    """Block floating point: along one axis, ``box`` values share one exponent (DSQ, section 4; MX's INT grid).

    With E = max floor(log2|x|) over the box, the step is ``2**(E - (bits - 2))`` and the largest code
    ``2**(bits - 1) - 1``. Raises ValueError for bits, box or exponent bits out of range.
    """

    name: ClassVar[str] = "bfp"
    #: from the two all-equal BFP rows of the paper's table 1
    law: ClassVar[Law] = Law(
        0.56 / 32 ** (2 * 0.82),
        0.82,
        "table 1's BFP [32,32,32,32] 0.56x and [16,16,16,16] 0.18x; p = ln(0.56/0.18)/ln 4 to two digits",
    )

    exponent_bits: int = SCALE_BITS  #: width of the shared exponent

    def __post_init__(self) -> None:
        BoxFormat.__post_init__(self)
        object.__setattr__(self, "exponent_bits", whole_number("exponent_bits", self.exponent_bits, 1, 16))

    @property
    def scale_bits(self) -> int:
        return self.exponent_bits
