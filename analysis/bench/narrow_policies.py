"""The transformers of policies.py at a width of 128: what a policy takes once for each saved tensor weighs more."""

from collections.abc import Iterator

from analysis.bench.policies import races_of, transformers
from analysis.timing import Race


def races(rounds: int) -> Iterator[Race]:
    return races_of(transformers(128), rounds, before=25)
