"""Number formats. A format knows numbers: its grid, its bits a value. It knows neither tensors nor bytes."""

from dataclasses import dataclass
from functools import lru_cache

from dsq.arguments import whole_number
from dsq.kernels import BIAS, MAX_BITS, Grid

#: widest format; above MAX_BITS a value is kept in the floating format it came in
WIDEST = 32


@dataclass(frozen=True, slots=True)
class BFP:
    """Block floating point: along one axis, ``box`` values share one exponent (DSQ, section 4; MX's INT grid).

    With E = max floor(log2|x|) over the box, the step is ``2**(E - (bits - 2))`` and the largest code
    ``2**(bits - 1) - 1``. Raises ValueError for bits, box or exponent bits out of range.
    """

    bits: int  #: width of a code, sign included: 2..16 is packed, 17..32 keeps the value as it is
    box: int = 16  #: values that share an exponent
    exponent_bits: int = 8  #: width of the shared exponent; kernels store 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, 2, WIDEST))
        object.__setattr__(self, "box", whole_number("box", self.box, 1, (1 << 31) - 1))
        if self.exponent_bits != 8:
            raise ValueError(f"exponent_bits must be 8, got {self.exponent_bits!r}")

    @property
    def grid(self) -> Grid | None:
        """What the kernels need; None where values are kept as they are."""
        return _grid(self.bits, self.box, None)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Fixed point: one binary point for the whole tensor.

    ``fraction_bits`` None places it by the tensor's largest value (dynamic: the grid of BFP with one box); a number
    leaves it there for good (static: step ``2**-fraction_bits``, values beyond the range are clipped), which is how the
    paper's fixed-point rows behave. Raises ValueError for bits or fraction bits out of range.
    """

    bits: int  #: width of a code, sign included: 2..16 is packed, 17..32 keeps the value as it is
    fraction_bits: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, 2, WIDEST))
        if self.fraction_bits is not None:  # the exponent has to be one that is stored
            low, high = self.bits - 2 - BIAS, self.bits - 2 + BIAS
            object.__setattr__(self, "fraction_bits", whole_number("fraction_bits", self.fraction_bits, low, high))

    @property
    def grid(self) -> Grid | None:
        """What the kernels need; None where values are kept as they are."""
        return _grid(self.bits, 0, None if self.fraction_bits is None else self.bits - 2 - self.fraction_bits)


@dataclass(frozen=True, slots=True)
class Identity:
    """Values as they are."""

    @property
    def bits(self) -> int:
        return WIDEST

    @property
    def grid(self) -> None:
        return None


Format = BFP | FixedPoint | Identity


@lru_cache  # asked for many times a layer
def _grid(bits: int, box: int, exponent: int | None) -> Grid | None:
    return Grid(bits, box, exponent) if bits <= MAX_BITS else None
