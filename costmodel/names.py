"""Which name a user probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that begins with `name`, or else looks most like it."""
    wanted, candidates = name.lower(), list(known)
    begins = [candidate for candidate in candidates if wanted and candidate.startswith(wanted)]
    return begins[0] if begins else difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.0)[0]
