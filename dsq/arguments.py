"""Checks of arguments: one error line that names the argument, what is accepted and what was given."""

import inspect
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import inf
from numbers import Integral
from typing import Any

_PASSED_ON = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def whole_number(name: str, value: Any, least: float = -inf, most: float = inf) -> int:
    """Return ``value`` as an int. Raises ValueError where it is no whole number (True is none) or out of range."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        bounds = f" in {least}..{most}" if most < inf else f" from {least}" if least > -inf else ""
        raise ValueError(f"{name} must be a whole number{bounds}, got {value!r}")
    return int(value)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of an error line: the one of ``words`` that ``word`` looks like, or nothing."""
    accepted = list(words)
    matches = get_close_matches(word, accepted, 1, 0.5) or get_close_matches(word.lower(), accepted, 1, 0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def pattern(name: str, value: Any) -> re.Pattern[str]:
    """Return ``value`` compiled. Raises ValueError where it is no regular expression."""
    try:
        return re.compile(value)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{name} must be a regular expression of module names, got {value!r} ({error})") from None


def number(
    name: str, value: Any, *, least: float = -inf, above: float = -inf, most: float = inf, below: float = inf
) -> float:
    """Return ``value``. Raises ValueError where it is no number (True is none), not finite or out of range.

    Args:
        least, most: bounds that are in range themselves; above, below: bounds that are not.
    """
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not (least <= value <= most and above < value < below):
        low = f"[{least:g}" if least > -inf else f"({above:g}"
        high = f"{most:g}]" if most < inf else f"{below:g})"
        raise ValueError(f"{name} must be a number in {low}, {high}, got {value!r}")
    result: float = value
    return result


def flag(name: str, value: Any) -> bool:
    """Return ``value``. Raises ValueError where it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_keys(name: str, value: Any, accepted: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise ValueError, naming the first wrong key, if ``value`` is no dictionary with the ``accepted`` keys, and
    perhaps ``optional`` ones."""
    keys = set(value) if isinstance(value, dict) else set()
    if wrong := sorted((keys - {*optional}) ^ set(accepted), key=lambda key: (key not in keys, str(key))):
        text = f"{wrong[0]!r} is {'unknown' if wrong[0] in keys else 'missing'}"
        raise ValueError(f"{name} must be a dictionary with the keys {', '.join(sorted(accepted))}; {text}")


def choice(name: str, value: Any, accepted: Iterable[str]) -> str:
    """Return ``value``. Raises ValueError where it is none of the accepted words."""
    words = tuple(accepted)
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
    return str(value)


def as_called(model: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the module ``model`` is called with: a batch whose keys are names of its forward's
    parameters, as Hugging Face's are, gives keywords; all else stays as it is."""
    if len(inputs) != 1 or keywords or not isinstance(batch := inputs[0], Mapping) or not batch:
        return inputs, keywords
    return ((), dict(batch)) if set(batch) <= _parameters(model) else (inputs, keywords)


def _parameters(model: Any) -> set[str]:
    """Return the names of the forward's parameters; of a wrapper's, which passes on all, those of the module in it."""
    parameters = inspect.signature(model.forward).parameters
    names = {name for name, parameter in parameters.items() if parameter.kind not in _PASSED_ON}
    return names or set().union(*map(_parameters, model.children()))
