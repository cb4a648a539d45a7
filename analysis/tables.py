"""Tables of pages: each stands between two comments of a page, of which the first says what it is.

<!-- table: KIND WORDS -->
<!-- end -->
"""

import inspect
import re
import shlex
from collections.abc import Callable, Mapping

_TABLE = re.compile(r"(<!-- table: (?P<words>[^\n]*) -->\n)(?:(?!<!-- table: ).)*?(<!-- end -->)", re.DOTALL)


def written(page: str, kinds: Mapping[str, Callable[..., str]]) -> str:
    """Return the page with new tables, by ``kinds`` of their words. Raises ValueError for an unknown table."""

    def table(words: str) -> str:
        kind, *arguments = shlex.split(words)
        if kind not in kinds:
            raise ValueError(f"table: {words}: accepted are {', '.join(kinds)}")
        try:
            inspect.signature(kinds[kind]).bind(*arguments)
        except TypeError as error:
            raise ValueError(f"table: {words}: {error}") from None
        return kinds[kind](*arguments)

    return _TABLE.sub(lambda match: f"{match[1]}\n{table(match['words'])}\n\n{match[3]}", page)
