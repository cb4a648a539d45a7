"""The --dsq-* flags of the command line and of the tasks' options, generated from DSQConfig's fields."""

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Callable
from dataclasses import field
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from dsq.config import DSQConfig
from dsq.precision import AUTO, DEFAULT_LEVELS, SAVING_LEVELS, parse_levels

logger = logging.getLogger(__name__)

ABOUT = """Train in few bits, at a precision that rises by a schedule. A run writes its record to dsq_history.json in
--save-dir. A checkpoint holds the level; generation runs at that level and needs none of these flags. dsq-train needs
no set-up; the unmodified fairseq-train --user-dir fairseq_plugin needs "python -m fairseq_plugin.startup install"
once."""
_RESET = """ignore the DSQ state of the restored checkpoint: begin at the first of --dsq-levels, or continue without
DSQ, at each start; --reset-optimizer and --finetune-from-model imply it"""
#: the fields of DSQConfig that are flags; fairseq has no PEFT adapters
OPTIONS = {option.name: option for option in dataclasses.fields(DSQConfig) if option.name != "adapters"}
#: the fields whose flags are text, which DSQConfig parses
_TEXTS = ("levels", "rise_at")


class InputError(ValueError):
    """A user's input that cannot be used: one line that names the flag and the accepted form."""


def _default(name: str) -> Any:
    return None if name in _TEXTS else OPTIONS[name].default


def _fields() -> list[tuple[str, Any, Any]]:
    options = []
    for name, option in OPTIONS.items():
        kind, default = option.metadata["kind"], _default(name)
        typed = Optional[kind] if default is None else kind  # noqa: UP045 - fairseq reads no "X | None"
        options.append((f"dsq_{name}", typed, field(default=default, metadata={"help": option.metadata["help"]})))
    options.append(("dsq_reset", bool, field(default=False, metadata={"help": _RESET})))
    options.append(("dsq_save_dir", str, field(default=II("checkpoint.save_dir"))))  # not a flag
    return options


#: base of a task's options: dsq_x is the flag --dsq-x and DSQConfig's field x
DSQFlags: Any = dataclasses.make_dataclass("DSQFlags", _fields(), bases=(FairseqDataclass,))


def flag_of(name: str) -> str:
    """Return the flag of a field: ``rise_at`` -> ``--dsq-rise-at``."""
    return "--dsq-" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser`` as a group of their own; ``config_of`` checks their values."""
    group = parser.add_argument_group("DSQ (dynamic stashing quantization)", ABOUT)
    for name, option in OPTIONS.items():
        default, text = _default(name), option.metadata["help"]
        if option.metadata["kind"] is bool:
            group.add_argument(flag_of(name), action="store_true", help=text)
            continue
        text += ". Absent: no DSQ" if name == "levels" else "" if default is None else f" (default: {default})"
        kind, metavar = option.metadata["kind"], option.metadata["metavar"]
        group.add_argument(flag_of(name), type=kind, default=default, metavar=metavar, help=text)
    group.add_argument("--dsq-reset", action="store_true", help=_RESET)


def config_of(options: object) -> DSQConfig | None:
    """Return the DSQConfig of ``options`` (argparse's namespace or a task's config); None without --dsq-levels.

    Logs a warning of flags without effect, and those of DSQConfig. Raises InputError for values that DSQConfig refuses.
    """
    values = {name: getattr(options, f"dsq_{name}", _default(name)) for name in OPTIONS}
    if values["levels"] is None:
        unused = [flag_of(name) for name, value in values.items() if value != _default(name)]
        if unused:
            text = f"without --dsq-levels there is no DSQ: {', '.join(unused)} does nothing"
            logger.warning('%s; "%s" is advised', text, DEFAULT_LEVELS[0])
        return None
    if values["levels"].strip() == AUTO.text:  # fairseq has flags of its own for autocast and halved models
        simulation, saving = DEFAULT_LEVELS[0], SAVING_LEVELS[0]
        raise InputError(f'--dsq-levels must name levels: "{simulation}" to simulate, "{saving}" to save memory alone')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = _config({**values, "rise_at": values["rise_at"] or ()})
    if len(config.levels) == 1 and config.patience != _default("patience"):
        logger.warning("--dsq-patience does nothing: --dsq-levels has one level")
    for warning in caught:
        logger.warning("--dsq-levels: %s", warning.message)
    return config


def _config(values: dict[str, Any]) -> DSQConfig:
    """Return ``DSQConfig(**values)``, whose errors name the flag instead of the field."""
    try:
        parse_levels(values["levels"])
    except ValueError as error:  # its formats are no --dsq-format
        raise InputError(f"--dsq-levels: {error}".replace(": levels must", " must", 1)) from None
    try:
        return DSQConfig(**values)
    except ValueError as error:
        name, _, requirement = str(error).partition(" ")
        raise InputError(f"{flag_of(name)} {requirement}" if name in OPTIONS else f"--dsq-levels: {error}") from None


def quiet(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return ``call(*args, **kwargs)`` without its warnings, which the run's DSQConfig gave before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)
