"""The options that describe a format, on the command line and in a run's record: derived from the registry of formats.

A later format needs no line here: its name becomes a choice of --format, its numeric fields become options.
"""

from collections.abc import Mapping
from typing import Any

from dsq.formats import FORMATS, WIDEST, Format, Identity, format_class, options


def names() -> tuple[str, ...]:
    return (*FORMATS, Identity.name)


def sizes(name: str) -> dict[str, int]:
    """The format's numeric fields and their defaults. One without a number (fixed point's binary point) costs nothing.

    Raises ValueError for an unknown name.
    """
    if name not in names():
        raise ValueError(f"format must be one of {', '.join(names())}, got {name!r}")
    fields = {} if name == Identity.name else options(name)
    return {field: default for field, default in fields.items() if type(default) is int}


def all_sizes() -> dict[str, dict[str, int]]:
    """Each field that some format has, with its default by format."""
    found: dict[str, dict[str, int]] = {}
    for name in names():
        for field, default in sizes(name).items():
            found.setdefault(field, {})[name] = default
    return found


def template(name: str, described: Mapping[str, Any]) -> Format:
    """The format with those of its sizes that `described` has; None or absent: the default. Raises ValueError."""
    given = {field: described[field] for field in sizes(name) if described.get(field) is not None}
    chosen: type[Format] = Identity if name == Identity.name else format_class(name)
    return chosen(WIDEST, **given)
