"""What a user asks for (DSQConfig), and what one linear layer computes with (Quantizers)."""

import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from dsq.arguments import pattern
from dsq.formats import BFP, FixedPoint, Format
from dsq.kernels import Factor, Product, Products
from dsq.packing import Rounding
from dsq.precision import Precision, check_levels
from dsq.scheduler import check_plateau

FormatName = Literal["bfp", "fixed"]
BoxAxis = Literal["contraction", "last"]
Units = Literal["exact", "float32"]
_BOX = 16


@dataclass(frozen=True)  # no slots: products is cached in its __dict__
class Quantizers:
    """The four formats of a linear layer, and how they are applied."""

    q0: Format
    q1: Format
    q2: Format
    q3: Format
    rounding: Rounding = "nearest"
    box_axis: BoxAxis = "contraction"
    units: Units = "exact"

    @property
    def precision(self) -> Precision:
        return Precision(self.q0.bits, self.q1.bits, self.q2.bits, self.q3.bits)

    @cached_property
    def products(self) -> Products:
        """The three GEMMs (dsq.functional), each tensor with random numbers of its own."""
        q0, q1, q2, q3 = self.q0.grid, self.q1.grid, self.q2.grid, self.q3.grid
        axis = 0 if self.box_axis == "contraction" else -1
        exact = self.units == "exact"
        return Products(
            Product(Factor(q0, -1, seed=0), Factor(q0, -1, transposed=True, seed=1), exact=exact),
            Product(Factor(q2, -1, seed=4), Factor(q1, axis, seed=3), result=q3, result_seed=6, exact=exact),
            Product(Factor(q3, axis, transposed=True, seed=5), Factor(q1, axis, seed=2), exact=exact),
        )

    @staticmethod
    def of(precision: "Precision | str | Quantizers") -> "Quantizers":
        """BFP at ``precision`` with every default; quantizers pass through."""
        if isinstance(precision, Quantizers):
            return precision
        return _bfp(precision if isinstance(precision, Precision) else Precision.parse(precision))


@lru_cache
def _bfp(precision: Precision) -> Quantizers:
    q0, q1, q2, q3 = map(BFP, precision)
    return Quantizers(q0, q1, q2, q3)


@dataclass(frozen=True, slots=True)
class DSQConfig:
    """Dynamic stashing quantization of a model.

    Raises ValueError for a value out of its range; warns where a q3 lies under 16.
    """

    #: the schedule, lowest first; one level is a static precision. A string or Precision stands for one level
    levels: tuple[Precision, ...] = (Precision(2, 2, 2, 16), Precision(16, 4, 4, 16))
    format: FormatName = "bfp"
    box: int = _BOX  #: values that share an exponent (bfp)
    fraction_bits: int | None = None  #: the static binary point (fixed); None: placed by the largest value
    rounding: Rounding = "nearest"
    #: "contraction": boxes run along the contraction axis of the GEMM that consumes the tensor; "last": the last axis
    box_axis: BoxAxis = "contraction"
    #: "exact": each GEMM on the fastest units that hold its products exactly (dsq.gemm); "float32": all in float32
    units: Units = "exact"
    exclude: str | None = None  #: regular expression; modules whose name it matches anywhere stay as they are
    patience: int = 5  #: validations without improvement before the next level (DSQ, section 6: N = 5)
    threshold: float = 0.0  #: least relative improvement of the validation loss that counts as one
    eval_full_precision: bool = False  #: evaluate in floating point; default: at q0, what was trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", check_levels(self.levels))
        _check_choice("format", self.format, FormatName)
        _check_choice("rounding", self.rounding, Rounding)
        _check_choice("box_axis", self.box_axis, BoxAxis)
        _check_choice("units", self.units, Units)
        if self.format == "bfp" and self.fraction_bits is not None:
            raise ValueError("fraction_bits goes with format='fixed'; a BFP's point follows its boxes")
        if self.format == "fixed" and self.box != _BOX:
            raise ValueError("box goes with format='bfp'; fixed point has one binary point for a tensor")
        check_plateau(self.patience, self.threshold)
        if self.exclude is not None:
            pattern("exclude", self.exclude)
        if not isinstance(self.eval_full_precision, bool):
            raise ValueError(f"eval_full_precision must be True or False, got {self.eval_full_precision!r}")
        for level in range(len(self.levels)):
            self.at(level)
        low = " ".join(str(level) for level in self.levels if level.q3 < 16)
        if low:
            text = f"q3 is under 16 bits in {low}: the paper's Appendix C finds that training can then fail"
            warnings.warn(text, stacklevel=3)

    def at(self, level: int) -> Quantizers:
        """The quantizers of every converted layer at ``level`` (0 is the first)."""
        q0, q1, q2, q3 = (self._format(bits) for bits in self.levels[level])
        return Quantizers(q0, q1, q2, q3, self.rounding, self.box_axis, self.units)

    def _format(self, bits: int) -> Format:
        return BFP(bits, self.box) if self.format == "bfp" else FixedPoint(bits, self.fraction_bits)


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
