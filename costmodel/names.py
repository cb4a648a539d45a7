"""Which of the known names a user means."""

import difflib
import re
from collections.abc import Iterable

#: what names leave out: all but letters and digits, and words of a device's full name, as "NVIDIA A100-SXM4-80GB"
_LEFT_OUT = re.compile(r"[^a-z0-9]|nvidia|geforce|tesla|amd|instinct|sxm\d?")


def completed(kind: str, name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The known name that ``name`` is, whatever its case, dashes and dots, or that alone begins with it or holds it.

    Args:
        kind, otherwise: for the error: "hardware"; what else is accepted.
    Raises:
        ValueError: none is meant, or several are; it names the nearest.
    """
    names, wanted = {_plain(one): one for one in known}, _plain(name)
    if wanted in names:
        return names[wanted]
    begins = [one for one in names if wanted and one.startswith(wanted)]
    found = begins or [one for one in names if len(wanted) > 1 and wanted in one]
    if len(found) == 1:
        return names[found[0]]
    meant = suggestion(name, [names[one] for one in found] or names.values())
    raise ValueError(f"unknown {kind} {name!r}: {meant}known are {', '.join(sorted(names.values()))}{otherwise}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "nearest is 'opt_1.3b'; ": the known names that begin with ``name``, or the one that looks like it, or the
    longest that it holds; "" if there is none."""
    names, wanted = {_plain(one): one for one in known}, _plain(name)
    near = [one for one in names if wanted and one.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, names, n=1, cutoff=0.85)
    near = near or sorted((one for one in names if one in wanted), key=len)[-1:]
    near = near or difflib.get_close_matches(wanted, names, n=1)
    return f"nearest is {', '.join(repr(names[one]) for one in near)}; " if near else ""


def _plain(name: str) -> str:
    return _LEFT_OUT.sub("", name.lower())
