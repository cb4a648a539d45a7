"""DSQConfig holds what a user asks for: the schedule, the format and how it is applied."""

# ruff: noqa: RUF009 - _option makes a field

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeVar, get_args

from dsq import formats
from dsq.arguments import choice, flag, pattern
from dsq.packing import Rounding
from dsq.precision import DEFAULT_LEVELS, Level, Precision, RiseAt, damage, parse_levels, parse_rise_at
from dsq.quantizers import MIN_WEIGHT_BITS, Gemm, Quantizers
from dsq.scheduler import PrecisionScheduler, check_plateau

StashScope = Literal["linears", "all"]


Given_contra = TypeVar("Given_contra", contravariant=True)
Kept_co = TypeVar("Kept_co", covariant=True)


class _Converted(Protocol[Given_contra, Kept_co]):
    """To type checkers, a field that is given in one type and kept in another."""

    def __get__(self, config: object, owner: object) -> Kept_co: ...
    def __set__(self, config: object, value: Given_contra) -> None: ...


def _option(default: Any, help: str, metavar: str | None = None, words: Any = None, kind: type | None = None) -> Any:
    """Return a field that describes itself. ``words``: a Literal, or the words that are accepted."""
    choices = None if words is None else get_args(words) or tuple(words)
    metavar = metavar if choices is None else f"{{{','.join(choices)}}}"
    kind = kind or (type(default) if isinstance(default, (int, float)) else str)
    return field(default=default, metadata={"help": help, "kind": kind, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class DSQConfig:
    """Dynamic stashing quantization of a model.

    The format is ``snvint`` unless told: at 2 to 4 bits it loses less than the paper's ``bfp``, at the same bytes
    (docs/formats.md, which has its time too); widths above 6 are ``bfp`` then, which is as good there.

    The fields describe themselves, once for configs, flags and ledgers. ``dataclasses.fields(DSQConfig)`` gives the
    names and defaults, and each field's ``metadata`` has "help", "kind" (bool, int, float or str), "choices" (the
    accepted words, or None) and "metavar". A command line has a switch for a bool, and for any other field a flag of
    its kind.

    Raises ValueError for a value out of its range; warns of widths and rounding that were seen to damage training.
    """

    levels: _Converted[Level | Iterable[Level], tuple[Precision, ...]] = _option(
        DEFAULT_LEVELS, 'precisions [q0,q1,q2,q3], lowest first, as "[4,3,3,8] [8,4,4,8]"; one is static', "LEVELS"
    )
    format: str = _option(
        formats.DEFAULT,
        "number format: snvint (blocks of integers with a signed, fractional scale), bfp (block floating point, the "
        "paper's, less exact at few bits) or fixed (fixed point)",
        words=formats.FORMATS,
    )
    block_size: int = _option(formats.BLOCK_SIZE, "values that share a scale (all but fixed)", "N")
    fraction_bits: int | None = _option(
        None, "static binary point of fixed: the step is 2^-N; absent: placed by each largest value", "N", kind=int
    )
    rounding: Rounding = _option("nearest", "rounding: nearest (ties to even) or stochastic", words=Rounding)
    gemm: Gemm = _option(
        "exact", "each GEMM on the fastest gemm that hold its products exactly, or all in float32", words=Gemm
    )
    min_weight_bits: int = _option(
        MIN_WEIGHT_BITS, "least bits of the weight in the backward, up to q0; 0 reads it at q1, as the paper does", "N"
    )
    stash: StashScope = _option(
        "all",
        "stashed at q1: the layers' inputs, or all that operations of dsq.stash's table keep, at 4 bits or more",
        words=StashScope,
    )
    attention: bool = _option(
        False, "quantize attention's two products too, of queries by keys and of weights by values"
    )
    adapters: bool = _option(False, "convert PEFT's adapters (lora_A, lora_B) too, beside the layers that they adapt")
    exclude: str | None = _option(
        None, "layers whose name it matches anywhere stay in floating point, as in output_projection", "REGEX"
    )
    tied: bool = _option(
        False, "convert layers whose weight is an embedding's too: few bits there keep a model from learning"
    )
    patience: int = _option(
        5, "validations without a better validation loss before the next level (DSQ, section 6: N = 5)", "N"
    )
    threshold: float = _option(
        0.0, "a validation loss is better if it is lower than the best by more than this fraction of it", "FRACTION"
    )
    rise_at: _Converted[RiseAt, tuple[float, ...]] = _option(
        (), "updates, or fractions of the run as 0.8, at which each later level begins; absent: at plateaus", "N"
    )
    eval_full_precision: bool = _option(False, "validate and generate in floating point, not at q0")

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", parse_levels(self.levels))
        choice("stash", self.stash, get_args(StashScope))
        check_plateau(self.patience, self.threshold)
        object.__setattr__(self, "rise_at", parse_rise_at(self.rise_at, len(self.levels)))
        if self.exclude is not None:
            pattern("exclude", self.exclude)
        for name in ("attention", "adapters", "tied", "eval_full_precision"):
            flag(name, getattr(self, name))
        for level in range(len(self.levels)):
            self.at(level)
        for text in damage(self.levels, self.format, self.rounding):
            warnings.warn(text, stacklevel=3)

    def at(self, level: int) -> Quantizers:
        """Return the quantizers of every converted layer at ``level`` (0 is the first)."""
        q0, q1, q2, q3 = (self._format(bits) for bits in self.levels[level])
        return Quantizers(q0, q1, q2, q3, self.rounding, self.gemm, self.min_weight_bits)

    @property
    def follows_validation(self) -> bool:
        """Return whether levels begin at plateaus of a validation loss."""
        return len(self.levels) > 1 and not self.rise_at

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them; ``from_dict`` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"levels": [list(level) for level in self.levels], "rise_at": list(self.rise_at)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "DSQConfig":
        """Return the config that ``as_dict`` gave, without its warnings: they were given with the first one.

        Raises ValueError for a field that there is none of, or out of range.
        """
        known = [field.name for field in fields(DSQConfig)]
        if not isinstance(values, dict):
            raise ValueError(f"a DSQConfig is made of a dictionary of its fields, got {values!r}")
        if (
            values.get("block_axis") == "contraction"
        ):  # a field of configs saved before 2026-11-26, of which this is left
            values = {name: value for name, value in values.items() if name != "block_axis"}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"a DSQConfig has the fields {', '.join(known)}, got {', '.join(map(repr, unknown))}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DSQConfig(**values)

    @staticmethod
    def of(config: "DSQConfig | str | dict[str, Any] | None" = None, **options: Any) -> "DSQConfig":
        """Return the config that a trainer's one line asks for: the way in is the same in every trainer.

        ``config`` is a DSQConfig, what its ``as_dict`` gave, or the schedule as text, ``"[4,3,3,8] [8,4,4,8]"``;
        ``options`` are its other fields. Raises TypeError where
        ``config`` is something else, options stand beside a whole config, or are none of its fields.
        """
        names = [it.name for it in fields(DSQConfig)]
        if unknown := [name for name in options if name not in names]:
            raise TypeError(f"DSQConfig has no option {unknown[0]!r}; it takes {', '.join(names)}")
        if config is None or isinstance(config, str):
            return DSQConfig(**options) if config is None else DSQConfig(config, **options)
        if options:
            raise TypeError(f"config is whole already: put {', '.join(options)} into it, or give its levels as text")
        if isinstance(config, dict):
            return DSQConfig.from_dict(config)
        if not isinstance(config, DSQConfig):
            got = " ".join(repr(config).split())[:60]  # a module's has lines
            raise TypeError(f'config must be a DSQConfig or a schedule as text, "[8,4,8,8]", got {got}')
        return config

    def scheduler(self, total_updates: int | None = None) -> PrecisionScheduler:
        """Return the scheduler of this schedule. Raises ValueError for fractions in ``rise_at`` without a total."""
        return PrecisionScheduler(self.levels, self.patience, self.threshold, self.rise_at, total_updates)

    def _format(self, bits: int) -> formats.Format:
        of_some_formats = (it for it in fields(self) if it.name in ("block_size", "fraction_bits"))
        given = {it.name: getattr(self, it.name) for it in of_some_formats if getattr(self, it.name) != it.default}
        return formats.named(self.format, bits, **given)
