"""Which name a user probably meant."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "nearest is 'opt_1.3b'; ": the known name that begins with `name`, or else looks like it; "" where none does."""
    wanted, candidates = name.lower(), list(known)
    begins = [candidate for candidate in candidates if wanted and candidate.startswith(wanted)]
    near = begins or difflib.get_close_matches(wanted, candidates, n=1)
    return f"nearest is {near[0]!r}; " if near else ""
