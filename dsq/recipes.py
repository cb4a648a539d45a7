"""Published recipes of training in few bits (recipes.toml), by name: ``python -m dsq.recipes`` lists them."""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dsq.arguments import did_you_mean


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as its authors published it."""

    operands: str  #: the long form of dsq/operands.py
    source: str  #: paper or code that defines it
    result: str  #: what its authors report
    in_16_bits: str  #: what stays in 16 bits
    plain_ends: str = ""  #: DSQConfig's, unless it has its own


@lru_cache(maxsize=1)
def _recipes() -> dict[str, Recipe]:
    tables = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())
    return {name: Recipe(**table) for name, table in tables.items()}


def names() -> list[str]:
    return list(_recipes())


def recipe(name: str) -> Recipe:
    """Return the recipe called ``name``. Raises ValueError for an unknown one, with the nearest."""
    if name not in _recipes():
        raise ValueError(f"recipe must be one of {', '.join(names())}, got {name!r}{did_you_mean(name, names())}")
    return _recipes()[name]


def main() -> None:
    """Print each recipe: its operands, what stays in 16 bits, the published result and the source."""
    for name, entry in _recipes().items():
        print(f"{name}\n  {entry.operands}\n  in 16 bits: {entry.in_16_bits}")
        print(f"  published: {entry.result}\n  source: {entry.source}")


if __name__ == "__main__":
    main()
