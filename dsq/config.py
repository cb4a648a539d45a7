"""DSQConfig holds what a user asks for: the schedule, the format and how it is applied."""

# ruff: noqa: RUF009 - _option makes a field

import inspect
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeVar, get_args

from dsq import formats, recipes
from dsq.arguments import choice, flag, pattern
from dsq.layers.blocks import parse_ends
from dsq.operands import MIN_WEIGHT_BITS
from dsq.packing import Rounding
from dsq.precision import (
    AUTO,
    DEFAULT_LEVELS,
    SAVING_LEVELS,
    Level,
    Precision,
    RiseAt,
    damage,
    parse_levels,
    parse_rise_at,
)
from dsq.quantizers import Gemm, Quantizers
from dsq.scheduler import PrecisionScheduler, check_plateau

StashScope = Literal["linears", "all"]


Input_contra = TypeVar("Input_contra", contravariant=True)
Stored_co = TypeVar("Stored_co", covariant=True)


class _Converted(Protocol[Input_contra, Stored_co]):
    """To type checkers, a field that is set in one type and read in another."""

    def __get__(self, config: object, owner: object) -> Stored_co: ...
    def __set__(self, config: object, value: Input_contra) -> None: ...


def _option(default: Any, help: str, metavar: str | None = None, words: Any = None, kind: type | None = None) -> Any:
    """Return a field that describes itself. ``words``: a Literal, or the words that are accepted."""
    choices = None if words is None else get_args(words) or tuple(words)
    metavar = metavar if choices is None else f"{{{','.join(choices)}}}"
    kind = kind or (type(default) if isinstance(default, (int, float)) else str)
    return field(default=default, metadata={"help": help, "kind": kind, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class DSQConfig:
    """The settings of dynamic stashing quantization: which bits each operand has, and where quantization applies.

    Command-line flags, saved configs and docs/config.md are generated from these fields: each field's ``metadata``
    has "help", "kind" (bool, int, float or str), "choices" (the accepted words, or None) and "metavar".

    Raises ValueError for a value out of range, and warns of widths and rounding that damaged a training
    (docs/formats.md).
    """

    levels: _Converted[Level | Iterable[Level], tuple[Precision, ...]] = _option(
        AUTO.text,
        'bits [q0,q1,q2,q3] of each level, lowest first, as "[4,3,3,8] [8,4,4,8]", formats of each operand, or the '
        "name of a recipe, as nvfp4-nvidia (docs/formats.md); a single level never changes; auto: [-,4,-,-], which "
        "packs saved tensors alone, under autocast and where the device multiplies bfloat16, else [8,4,8,8]",
        "LEVELS",
    )
    format: str = _option(
        formats.DEFAULT,
        "number format: snvint (blocks of integers with a signed, fractional scale), bfp (the paper's block floating "
        "point, less accurate at few bits) or fixed (fixed point); snvint gives way to bfp above 6 bits",
        words=formats.FORMATS,
    )
    block_size: int = _option(
        formats.BLOCK_SIZE, "values that share a scale (not for fixed, which has one scale a tensor)", "N"
    )
    fraction_bits: int | None = _option(
        None,
        "binary point of the format fixed: the step is 2^-N; absent: the largest value of a tensor places it",
        "N",
        kind=int,
    )
    rounding: Rounding = _option("nearest", "rounding to nearest (ties to even) or stochastic rounding", words=Rounding)
    gemm: Gemm = _option(
        "exact",
        "exact: each GEMM runs on the fastest units whose products are exact; float32: all run in float32",
        words=Gemm,
    )
    min_weight_bits: int = _option(
        MIN_WEIGHT_BITS,
        "bits that the backward reads weights in, at least, up to q0; 0: at q1, as in the paper's equations",
        "N",
    )
    stash: StashScope = _option(
        "all",
        "saved tensors that are packed: linears, the inputs of converted layers, at q1; all, also those of attention, "
        "norms, activations and other operations, in max(q1, 4) bits or two more",
        words=StashScope,
    )
    attention: bool = _option(
        False, "also quantize attention's two products, of queries by keys and of weights by values"
    )
    adapters: bool = _option(
        False, "also convert PEFT's adapters (lora_A, lora_B); without it only the layers that they adapt"
    )
    exclude: str | None = _option(
        None, "layers to skip: those whose name the expression matches anywhere, as output_projection", "REGEX"
    )
    plain_ends: str | None = _option(
        None,
        "transformer blocks to skip at the beginning and at the end, as 2,8, or fractions of all, as 0.03,0.13, and "
        "with them layers outside of blocks, such as a head; absent: those that the recipe in levels names",
        "FIRST,LAST",
    )
    tied: bool = _option(
        False,
        "also convert layers that share their weight with an embedding; few bits there can stop a model from learning",
    )
    patience: int = _option(
        5, "validations without improvement before the next level begins (DSQ, section 6: N = 5)", "N"
    )
    threshold: float = _option(
        0.0, "fraction of the best validation loss by which a loss must be lower to count as an improvement", "FRACTION"
    )
    rise_at: _Converted[RiseAt, tuple[float, ...]] = _option(
        (),
        "updates, or fractions of the run as 0.8, at which each later level begins; absent: at plateaus of the loss",
        "N",
    )
    eval_full_precision: bool = _option(False, "validate and generate in floating point instead of at q0")

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", parse_levels(self.levels))
        choice("stash", self.stash, get_args(StashScope))
        check_plateau(self.patience, self.threshold)
        object.__setattr__(self, "rise_at", parse_rise_at(self.rise_at, len(self.levels)))
        if self.exclude is not None:
            pattern("exclude", self.exclude)
        if self.plain_ends is None:
            by_name = (recipes.recipe(level.text) for level in self.levels if level.text in recipes.names())
            object.__setattr__(self, "plain_ends", next((entry.plain_ends for entry in by_name), None) or None)
        if self.plain_ends is not None:
            parse_ends(self.plain_ends)
        for name in ("attention", "adapters", "tied", "eval_full_precision"):
            flag(name, getattr(self, name))
        if self.undecided and any(getattr(self, name) != _DEFAULTS[name] for name in _OF_PRODUCTS):
            object.__setattr__(self, "levels", DEFAULT_LEVELS)
        for level in range(len(self.levels)):
            self.at(level)
        in_bits = [level for level in self.levels if not level.text]
        for text in damage(in_bits, self.format, self.rounding):
            warnings.warn(text, stacklevel=3)

    def at(self, level: int) -> Quantizers:
        """Return the quantizers of every converted layer at ``level`` (0 is the first)."""
        precision = DEFAULT_LEVELS[0] if self.levels[level] == AUTO else self.levels[level]
        return Quantizers.at(precision, self._format, self.rounding, self.gemm, self.min_weight_bits)

    @property
    def undecided(self) -> bool:
        """Return whether the levels are "auto": no one named them, or a format, or how products are made."""
        return self.levels == (AUTO,)

    def decided(self, saves: bool) -> "DSQConfig":
        """Return the config with the levels that "auto" stands for: those of the stash alone if ``saves``."""
        return replace(self, levels=SAVING_LEVELS if saves else DEFAULT_LEVELS)

    @property
    def follows_validation(self) -> bool:
        """Return whether levels begin at plateaus of a validation loss."""
        return len(self.levels) > 1 and not self.rise_at

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them; ``from_dict`` reads them back."""
        values = {name: getattr(self, name) for name in _DEFAULTS}
        return values | {"levels": [level.as_json() for level in self.levels], "rise_at": list(self.rise_at)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "DSQConfig":
        """Return the config of ``as_dict``'s result, without warnings, which the first config gave.

        Raises ValueError for an unknown field, or a value out of range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a DSQConfig is made of a dictionary of its fields, got {values!r}")
        if unknown := sorted(values.keys() - _DEFAULTS.keys()):
            raise ValueError(f"a DSQConfig has the fields {', '.join(_DEFAULTS)}, got {', '.join(map(repr, unknown))}")
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
        if unknown := [name for name in options if name not in _DEFAULTS]:
            raise TypeError(f"DSQConfig has no option {unknown[0]!r}; it takes {', '.join(_DEFAULTS)}")
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
        options = {"block_size": self.block_size, "fraction_bits": self.fraction_bits}
        named = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        return formats.named(self.format, bits, **named)


#: options without which "auto" is for DynamicPrecision to decide: who names one simulates
_OF_PRODUCTS = ("format", "block_size", "fraction_bits", "rounding", "gemm", "min_weight_bits", "attention")
_DEFAULTS = {option.name: option.default for option in fields(DSQConfig)}


def _arguments() -> str:
    """Return the docstring's section of arguments, from the fields' metadata."""
    lines = (f"{option.name}: {option.metadata['help']}. Default: {option.default!r}." for option in fields(DSQConfig))
    return "Args:\n" + "\n".join(
        textwrap.fill(line, 110, initial_indent="    ", subsequent_indent=" " * 8) for line in lines
    )


if DSQConfig.__doc__:  # Python -OO drops it
    DSQConfig.__doc__ = f"{inspect.cleandoc(DSQConfig.__doc__)}\n\n{_arguments()}"
