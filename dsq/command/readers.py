"""Files that commands are given are read here: regular files, bounded in size and depth, with finite numbers.

A damaged or hostile file costs one line: every reader raises ValueError that names the file.
"""

import json
import math
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20
MOST_DEPTH = 50  #: of lists and tables in one another
MOST_PATTERN = 1000  #: characters of a regular expression
MOST_REPEATS = 4  #: + and * and {n,} of a regular expression
#: a key of TOML with more parts takes tomllib time that grows with their square
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){50}""")

_REPEAT = re.compile(r"[*+]|\{\d*,\d*\}")


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a regular file of at most ``most`` bytes, in UTF-8."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO without a writer does not wait
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} cannot be read: accepted are regular files")
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ValueError(f"{path} is larger than {most:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error.reason} at byte {error.start:,}") from None


def read_json(path: str | Path) -> Any:
    """The data of a JSON file."""
    return _parsed(path, "JSON", lambda text: json.loads(text, parse_float=_finite, parse_constant=_finite))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The data of a TOML file."""

    def parse(text: str) -> Any:
        if _LONG_KEY.search(text):
            raise ValueError("a key has more than 50 parts")
        return tomllib.loads(text, parse_float=_finite)

    data: dict[str, Any] = _parsed(path, "TOML", parse)
    return data


def check_pattern(label: str, text: str) -> None:
    """Raise ValueError for a regular expression that could take for ever: of a file, which somebody else wrote.

    Accepted are MOST_PATTERN characters with MOST_REPEATS repetitions without limit, none of them within another.
    """
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{label} must be a regular expression: {error}") from None
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", text)  # escapes and classes hold no repetition
    if len(text) > MOST_PATTERN or len(_REPEAT.findall(bare)) > MOST_REPEATS or _repeats_a_choice(bare):
        limits = f"{MOST_PATTERN} characters and {MOST_REPEATS} repetitions, none of a group with a choice in it"
        raise ValueError(f"{label}: accepted are regular expressions of at most {limits}")


def _repeats_a_choice(bare: str) -> bool:
    """Whether a group that may match in several ways is repeated: the time of such a pattern can grow exponentially."""
    choices = [False]  #: of each open group, whether something in it may match in several ways
    for place, character in enumerate(bare):
        if character == "(":
            choices.append(False)
        elif character == ")" and len(choices) > 1:
            inner = choices.pop()
            if inner and _REPEAT.match(bare, place + 1):
                return True
            choices[-1] |= inner
        elif character in "*+{|" or (character == "?" and bare[place - 1 : place] != "("):
            choices[-1] = True
    return False


def _parsed(path: str | Path, kind: str, parse: Any) -> Any:
    text = read_text(path)
    try:
        data = parse(text)
        _check_depth(data)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{path} is not {kind}: {error}") from None
    return data


def _finite(text: str) -> float:
    number = float(text.replace("_", ""))
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, got {text[:40]}")
    return number


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(MOST_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [it for values in inner for it in values]
    if level:
        raise RecursionError
