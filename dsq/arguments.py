"""Checks of arguments: one error line that names the argument, what is accepted and what was given."""

import re
from math import inf
from numbers import Integral
from typing import Any


def whole_number(name: str, value: Any, least: float = -inf, most: float = inf) -> int:
    """``value`` as an int. Raises ValueError where it is no whole number (True is none) or out of range."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        bounds = f" in {least}..{most}" if most < inf else f" from {least}" if least > -inf else ""
        raise ValueError(f"{name} must be a whole number{bounds}, got {value!r}")
    return int(value)


def pattern(name: str, value: Any) -> re.Pattern[str]:
    """``value`` compiled. Raises ValueError where it is no regular expression."""
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name} must be a regular expression of module names, got {value!r} ({error})") from None
