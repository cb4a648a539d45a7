"""The --dsq-* flags, made from DSQConfig's fields: command line, --help, the task's options, and back to a config."""

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
from dsq.precision import DEFAULT_LEVELS

logger = logging.getLogger(__name__)

ABOUT = """Training at a precision that rises by itself; the record of a run is dsq_history.json in --save-dir. A
checkpoint holds the level; generation runs at that level and needs none of these flags. dsq-train works as it is; the
unmodified fairseq-train --user-dir fairseq_plugin needs "python -m fairseq_plugin.startup install" once."""
_RESET = """leave the DSQ state of the restored checkpoint: begin at the first of --dsq-levels, or go on without DSQ, at
each start; --reset-optimizer and --finetune-from-model do so by themselves"""
#: the fields of DSQConfig that are flags; PEFT's adapters do not meet fairseq
OPTIONS = {option.name: option for option in dataclasses.fields(DSQConfig) if option.name != "adapters"}
#: the fields that a flag keeps as text, which DSQConfig parses
_TEXTS = ("levels", "rise_at")


class InputError(ValueError):
    """A user's input that cannot be used: one line that names the flag and the accepted form."""


def _default(name: str) -> Any:
    return None if name in _TEXTS else OPTIONS[name].default


def _fields() -> list[tuple[str, Any, Any]]:
    made = []
    for name, option in OPTIONS.items():
        kind, default = option.metadata["kind"], _default(name)
        typed = Optional[kind] if default is None else kind  # noqa: UP045 - fairseq reads no "X | None"
        made.append((f"dsq_{name}", typed, field(default=default, metadata={"help": option.metadata["help"]})))
    made.append(("dsq_reset", bool, field(default=False, metadata={"help": _RESET})))
    made.append(("dsq_save_dir", str, field(default=II("checkpoint.save_dir"))))  # of dsq_history.json; not a flag
    return made


#: what a task's options have: dsq_x is the flag --dsq-x and DSQConfig's field x
DSQFlags: Any = dataclasses.make_dataclass("DSQFlags", _fields(), bases=(FairseqDataclass,))


def flag_of(name: str) -> str:
    """``rise_at`` -> ``--dsq-rise-at``."""
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
    """The DSQConfig that ``options`` (argparse's namespace or a task's config) ask for; None without --dsq-levels.

    Logs a warning of flags that do nothing without --dsq-levels, and what DSQConfig warns of.
    Raises InputError for values that no run can use.
    """
    given = {name: getattr(options, f"dsq_{name}", _default(name)) for name in OPTIONS}
    config, found = None, []
    if given["levels"] is None:
        idle = [flag_of(name) for name, value in given.items() if value != _default(name)]
        text = f"without --dsq-levels there is no DSQ: {', '.join(idle)} does nothing"
        found = [f'{text}; "{DEFAULT_LEVELS[0]}" is advised'] if idle else []
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = _config({**given, "rise_at": given["rise_at"] or ()})
        found = [f"--dsq-levels: {warning.message}" for warning in caught]
        if len(config.levels) == 1 and config.patience != _default("patience"):
            found.insert(0, "--dsq-patience does nothing: --dsq-levels has one level")
    for text in found:
        logger.warning("%s", text)
    return config


def _config(given: dict[str, Any]) -> DSQConfig:
    """DSQConfig(**given), whose errors, which name a field, name the flag instead."""
    try:
        return DSQConfig(**given)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise InputError(f"{flag_of(name)} {rest}" if name in OPTIONS else f"--dsq-levels: {error}") from None


def quiet(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return ``call(*args, **kwargs)`` without its warnings: the DSQConfig of the run has warned once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)
