"""Which of the known names a user means, and what is refused."""

import difflib
import re
from collections.abc import Iterable
from itertools import combinations

#: what names leave out: all but letters and digits, and words of a device's full name, as "NVIDIA A100-SXM4-80GB"
_LEFT_OUT = re.compile(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct|sxm\d?|hbm\d?e?")


def refuse(*faults: tuple[object, str]) -> None:
    """Raise ValueError with the text of the first fault whose condition holds."""
    for condition, text in faults:
        if condition:
            raise ValueError(text)


def completed(
    kind: str, name: str, accepted: Iterable[str], otherwise: str = "", release: re.Pattern[str] | None = None
) -> str:
    """Return the known name that ``name`` is, whatever its case, dashes and dots; or the only one that has it as whole
    parts: "a100-80" is "a100-80gb" and "4090" is "rtx-4090", but "h20" is no "h200" and "l40" no "l40s".

    Args:
        kind, otherwise: for the error: "hardware"; what else is accepted.
        release: what a name may have besides.
    Raises:
        ValueError: none is meant, or several are; it names the nearest.
    """
    names, several = {_plain(full): full for full in accepted}, list[str]()
    for typed in [name, *([release.sub("", name)] if release else [])]:
        part = _plain(typed)
        having = [full for full in names.values() if part and _has_parts(full, part)]
        begins = [full for full in having if _plain(full).startswith(part)]
        several = [names[part]] if part in names else begins or having
        if len(several) == 1:
            return several[0]
    meant = f"nearest is {', '.join(map(repr, several))}; " if several else suggestion(typed, names.values())
    raise ValueError(f"unknown {kind} {name!r}: {meant}known are {', '.join(sorted(names.values()))}{otherwise}")


def _has_parts(name: str, part: str) -> bool:
    """Return whether ``part`` is whole parts of the name, which end at dashes, dots and units (80gb, 8b)."""
    words = [_plain(word) for word in re.split(r"[^a-z0-9]+|(?<=\d)(?=g?b\b)", name.lower())]
    return any("".join(words[start:end]) == part for start, end in combinations(range(len(words) + 1), 2))


def suggestion(name: str, accepted: Iterable[str]) -> str:
    """Return "nearest is 'opt_1.3b'; ": the known names that begin with ``name``, or the one that looks like it, or the
    longest that it holds; "" if there is none."""
    names, word = {_plain(one): one for one in accepted}, _plain(name)
    near = (
        [one for one in names if word and one.startswith(word)]
        or difflib.get_close_matches(word, names, n=1, cutoff=0.85)
        or sorted((one for one in names if one in word), key=len)[-1:]
        or difflib.get_close_matches(word, names, n=1)
    )
    return f"nearest is {', '.join(repr(names[one]) for one in near)}; " if near else ""


def _plain(name: str) -> str:
    return _LEFT_OUT.sub("", name.lower())
