"""What a user asks for: the schedule, the format and how it is applied."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar, get_args

from dsq import formats
from dsq.arguments import choice, flag, pattern
from dsq.damage import damage
from dsq.formats.layout import BoxAxis
from dsq.linear import Quantizers, Units
from dsq.packing import Rounding
from dsq.precision import DEFAULT_LEVELS, Level, Precision, RiseAt, check_levels, check_rise_at
from dsq.scheduler import PrecisionScheduler, check_plateau

Stash = Literal["linears", "all"]
LearningRate = Literal["keep", "restart"]


Given_contra = TypeVar("Given_contra", contravariant=True)
Kept_co = TypeVar("Kept_co", covariant=True)


class _Converted(Protocol[Given_contra, Kept_co]):
    """To type checkers, a field that is given in one type and kept in another."""

    def __get__(self, config: object, owner: object) -> Kept_co: ...
    def __set__(self, config: object, value: Given_contra) -> None: ...


_LEVELS: Any = DEFAULT_LEVELS
_AT_PLATEAUS: Any = ()


@dataclass(frozen=True, slots=True)
class DSQConfig:
    """Dynamic stashing quantization of a model.

    The format is ``snvint`` unless told: at 2 to 4 bits it loses less than the paper's ``bfp``, at the same bytes
    (docs/formats.md, which has its time too); widths above 6 are ``bfp`` then, which is as good there.

    Raises ValueError for a value out of its range; warns of widths and rounding that were seen to damage training.
    """

    #: the schedule, lowest first; one level is a static precision. A string or Precision stands for one level
    levels: _Converted[Level | Iterable[Level], tuple[Precision, ...]] = _LEVELS
    format: str = formats.DEFAULT  #: a name of dsq.formats.FORMATS
    box: int = formats.BOX  #: values that share a scale (all but fixed)
    fraction_bits: int | None = None  #: the static binary point (fixed); None: placed by the largest value
    rounding: Rounding = "nearest"
    #: "contraction": boxes run along the contraction axis of the GEMM that consumes the tensor; "last": the last axis
    box_axis: BoxAxis = "contraction"
    #: "exact": each GEMM on the fastest units that hold its products exactly; "float32": all in float32
    units: Units = "exact"
    #: "linears": the layers' inputs are stashed at q1; "all": what other operations of dsq.stash's table keep too, at
    #: no less than 4 bits
    stash: Stash = "linears"
    #: quantise attention's two products too (dsq.ops.attention): in nn.MultiheadAttention, in models of transformers
    #: and in modules that call F.scaled_dot_product_attention
    attention: bool = False
    adapters: bool = False  #: convert PEFT's adapters (lora_A, lora_B) too, beside the layers that they adapt
    exclude: str | None = None  #: regular expression; modules whose name it matches anywhere stay as they are
    #: convert layers whose weight is an embedding's too (output projections): few bits there keep a model from learning
    tied: bool = False
    patience: int = 5  #: validations without improvement before the next level (DSQ, section 6: N = 5)
    threshold: float = 0.0  #: least relative improvement of the validation loss that counts as one
    #: when each level but the first begins, in updates or fractions of the run; none: at plateaus
    rise_at: _Converted[RiseAt, tuple[float, ...]] = _AT_PLATEAUS
    #: at a rise the learning rate's schedule goes on ("keep"), or starts again in the updates that are left ("restart")
    lr_at_rise: LearningRate = "keep"
    eval_full_precision: bool = False  #: evaluate in floating point; default: at q0, what was trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", check_levels(self.levels))
        choice("stash", self.stash, get_args(Stash))
        choice("lr_at_rise", self.lr_at_rise, get_args(LearningRate))
        check_plateau(self.patience, self.threshold)
        object.__setattr__(self, "rise_at", check_rise_at(self.rise_at, len(self.levels)))
        if self.exclude is not None:
            pattern("exclude", self.exclude)
        for name in ("attention", "adapters", "tied", "eval_full_precision"):
            flag(name, getattr(self, name))
        for level in range(len(self.levels)):
            self.at(level)
        for text in damage(self.levels, self.format, self.rounding):
            warnings.warn(text, stacklevel=3)

    def at(self, level: int) -> Quantizers:
        """The quantizers of every converted layer at ``level`` (0 is the first)."""
        q0, q1, q2, q3 = (self._format(bits) for bits in self.levels[level])
        return Quantizers(q0, q1, q2, q3, self.rounding, self.box_axis, self.units)

    @property
    def follows_validation(self) -> bool:
        """Whether levels begin at plateaus of a validation loss."""
        return len(self.levels) > 1 and not self.rise_at

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them; ``from_dict`` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"levels": [list(level) for level in self.levels], "rise_at": list(self.rise_at)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "DSQConfig":
        """The config that ``as_dict`` gave, without its warnings: they were given with the first one.

        Raises ValueError for a field that there is none of, or out of range.
        """
        known = [field.name for field in fields(DSQConfig)]
        if not isinstance(values, dict):
            raise ValueError(f"a DSQConfig is made of a dictionary of its fields, got {values!r}")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"a DSQConfig has the fields {', '.join(known)}, got {', '.join(map(repr, unknown))}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DSQConfig(**values)

    def scheduler(self, total_updates: int | None = None) -> PrecisionScheduler:
        """The scheduler of this schedule. Raises ValueError where ``rise_at`` has fractions and no total is given."""
        return PrecisionScheduler(self.levels, self.patience, self.threshold, self.rise_at, total_updates)

    def _format(self, bits: int) -> formats.Format:
        given = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) != _OPTIONS[name]}
        return formats.named(self.format, bits, **given)


#: fields of DSQConfig that only some formats have, with their defaults
_OPTIONS = {"box": formats.BOX, "fraction_bits": None}
