"""The --dsq-* flags: one table, from which come the command line, --help, the task's options and a DSQConfig."""

import argparse
import contextlib
import dataclasses
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, get_args

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from dsq.config import DSQConfig, LearningRate, Stash
from dsq.formats import FORMATS, BoxAxis
from dsq.packing import Rounding
from dsq.precision import levels_text, parse_levels
from dsq.quantizers import Units

_DEFAULT: dict[str, Any] = {option.name: option.default for option in dataclasses.fields(DSQConfig)}

logger = logging.getLogger(__name__)

ABOUT = """Training at a precision that rises by itself; the record of a run is dsq_history.json in --save-dir. A
checkpoint holds the level; generation runs at the level the checkpoint was trained at, and needs none of these flags.
dsq-train works as it is; the unmodified fairseq-train --user-dir fairseq_plugin cannot import fairseq 0.12.2 on Python
3.11 and later before "python -m fairseq_plugin.startup install" was run once."""


class InputError(ValueError):
    """A user's input that cannot be used: one line that names the flag and the accepted form."""


def _flag(default: Any, metavar: str | None, help: str, check: bool = True) -> Any:
    """A field of DSQFlags; ``check``: DSQConfig can judge a value by itself, without the other flags."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "check": check})


def _one_of(words: Iterable[str]) -> str:
    """The metavar of a flag that takes one of these words."""
    return f"{{{','.join(words)}}}"


@dataclass
class DSQFlags(FairseqDataclass):
    """Dynamic stashing quantization: dsq_x is the flag --dsq-x and DSQConfig's field x."""

    # ruff: noqa: UP045 - fairseq's parser reads Optional[...], not "X | None"
    dsq_levels: Optional[str] = _flag(
        None,
        "LEVELS",
        "the precision schedule, lowest level first, each level [q0,q1,q2,q3] in bits of 2..32: "
        '"[4,3,3,8] [8,4,4,8]". One level is a static precision. Absent: no DSQ',
    )
    dsq_format: str = _flag(
        _DEFAULT["format"],
        _one_of(FORMATS),
        "number format: snvint (boxes of integers with a signed, fractional scale), sbfp (signed powers of two), bfp "
        "(block floating point, the paper's, less exact at few bits) or fixed (fixed point)",
    )
    dsq_fraction_bits: Optional[int] = _flag(
        _DEFAULT["fraction_bits"],
        "N",
        "static binary point of --dsq-format fixed: the step is 2^-N. Absent: placed by each tensor's largest value",
        check=False,
    )
    dsq_box: int = _flag(_DEFAULT["box"], "N", "values that share a scale (all but fixed)")
    dsq_box_axis: str = _flag(
        _DEFAULT["box_axis"],
        _one_of(get_args(BoxAxis)),
        "axis of the boxes: contraction (that of the GEMM that reads the tensor) or last (the tensor's own last axis)",
    )
    dsq_rounding: str = _flag(
        _DEFAULT["rounding"], _one_of(get_args(Rounding)), "rounding: nearest (ties to even) or stochastic"
    )
    dsq_units: str = _flag(
        _DEFAULT["units"],
        _one_of(get_args(Units)),
        "each GEMM on the fastest units that hold its products exactly (exact), or all in float32",
    )
    dsq_stash: str = _flag(
        _DEFAULT["stash"],
        _one_of(get_args(Stash)),
        "what is stashed at q1: the inputs of the linears, or every other tensor that the backward needs too, at 4 "
        "bits or more",
    )
    dsq_attention: bool = _flag(
        _DEFAULT["attention"],
        None,
        "quantise attention's two products too: of queries by keys, and of weights by values",
    )
    dsq_exclude: Optional[str] = _flag(
        _DEFAULT["exclude"],
        "REGEX",
        "linears whose name it matches anywhere stay in floating point, as in output_projection",
    )
    dsq_tied: bool = _flag(
        _DEFAULT["tied"],
        None,
        "convert linears whose weight is an embedding's too, as a shared output_projection; absent: they stay in "
        "floating point, as few bits there keep a model from learning",
    )
    dsq_patience: int = _flag(
        _DEFAULT["patience"], "N", "validations without a better validation loss before the next level"
    )
    dsq_threshold: float = _flag(
        _DEFAULT["threshold"],
        "FRACTION",
        "a validation loss is better if it is lower than the best by more than this fraction of it",
    )
    dsq_rise_at: Optional[str] = _flag(
        None,
        "N",
        "updates after which each level but the first begins, or fractions of the run that --max-update or --max-epoch "
        "bound, as in 0.8: the validation loss then decides nothing. Absent: at plateaus",
        check=False,
    )
    dsq_lr_at_rise: str = _flag(
        _DEFAULT["lr_at_rise"],
        _one_of(get_args(LearningRate)),
        "at a rise the schedule of the learning rate goes on (keep), or starts again in the updates that are left of "
        "the run (restart)",
    )
    dsq_eval_full_precision: bool = _flag(
        _DEFAULT["eval_full_precision"], None, "validate and generate in floating point, not at q0"
    )
    dsq_reset: bool = _flag(
        False,
        None,
        "leave the DSQ state of the restored checkpoint: begin at the first of --dsq-levels, or go on without DSQ, at "
        "each start; --reset-optimizer and --finetune-from-model do so by themselves",
    )
    dsq_save_dir: str = II("checkpoint.save_dir")  # where dsq_history.json goes; not a flag


_NUMBERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    Optional[int]: (int, "a whole number"),
    float: (float, "a number"),
}

#: the fields of DSQFlags that are flags
FLAGS = [option for option in dataclasses.fields(DSQFlags) if "help" in option.metadata]


def flag_of(name: str) -> str:
    """``box_axis`` -> ``--dsq-box-axis``."""
    return "--dsq-" + name.removeprefix("dsq_").replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser`` as a group of their own; values are checked one by one as they are read."""
    group = parser.add_argument_group("DSQ (dynamic stashing quantization)", ABOUT)
    for option in FLAGS:
        text = option.metadata["help"] + ("" if option.default in (None, False) else f" (default: {option.default})")
        if option.type is bool:
            group.add_argument(flag_of(option.name), action="store_true", help=text)
        else:
            group.add_argument(
                flag_of(option.name),
                type=_reader(option),
                default=option.default,
                metavar=option.metadata["metavar"],
                help=text,
            )


def check(options: object) -> None:
    """Raise InputError where ``config_of`` does; log nothing."""
    _config_and_warnings(options)


def config_of(options: object) -> DSQConfig | None:
    """The DSQConfig that ``options`` (argparse's namespace or a task's config) ask for; None without --dsq-levels.

    Logs a warning of flags that do nothing without --dsq-levels, and what the core warns of. Raises InputError for
    values that no run can use.
    """
    config, found = _config_and_warnings(options)
    for text in found:
        logger.warning("%s", text)
    return config


def _config_and_warnings(options: object) -> tuple[DSQConfig | None, list[str]]:
    given: dict[str, Any] = {
        option.name.removeprefix("dsq_"): getattr(options, option.name, option.default) for option in FLAGS
    }
    given.pop("reset")
    levels = given.pop("levels")
    given["rise_at"] = _numbers(given["rise_at"])
    if levels is None:
        idle = [flag_of(name) for name, value in given.items() if value != _DEFAULT[name]]
        return None, [f"without --dsq-levels there is no DSQ: {', '.join(idle)} does nothing"] if idle else []
    with _flags_named(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = DSQConfig(levels=quiet(parse_levels, levels), **given)
    found = [f"--dsq-levels: {warning.message}" for warning in caught]
    if len(config.levels) == 1 and config.patience != _DEFAULT["patience"]:
        found.insert(0, "--dsq-patience does nothing: --dsq-levels has one level")
    return config, found


def _numbers(text: str | None) -> tuple[float, ...]:
    """The numbers of --dsq-rise-at."""
    if not text:
        return ()
    try:
        return tuple(float(word) if "." in word else int(word) for word in re.split(r"[\s,]+", text.strip()))
    except ValueError:
        raise InputError(f"--dsq-rise-at must be numbers, as in 880 or 0.8, got {text!r}") from None


def _reader(option: dataclasses.Field) -> Callable[[str], Any]:
    """What turns the flag's text into its value, for argparse."""
    name = option.name.removeprefix("dsq_")

    def read(text: str) -> Any:
        value: Any = text
        if option.type in _NUMBERS:
            convert, accepted = _NUMBERS[option.type]
            try:
                value = convert(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"must be {accepted}, got {text!r}") from None
        try:
            if name == "levels":
                return levels_text(quiet(parse_levels, text))
            if option.metadata["check"]:
                quiet(DSQConfig, **{name: value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read


def quiet(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """``call`` without its warnings: argparse reads a flag twice, and the DSQConfig of the run warns once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Turns a ValueError of DSQConfig, which names its own field, into an InputError that names the flag."""
    try:
        yield
    except ValueError as error:
        field_name, _, rest = str(error).partition(" ")
        raise InputError(
            f"{flag_of(field_name)} {rest}" if field_name in _DEFAULT else f"--dsq-levels: {error}"
        ) from None
