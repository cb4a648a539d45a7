"""What dsq.Linear costs where there is next to nothing to compute: one small layer against nn.Linear."""

from collections.abc import Iterator

import torch
from torch import nn

from analysis.bench.step import PRECISIONS, converted, step_of
from analysis.timing import Race, race

WIDTH, TOKENS = 64, 32


def races(rounds: int) -> Iterator[Race]:
    """At least 30 rounds."""
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH, requires_grad=True)
    contestants = {p: step_of(converted(layer, levels=p), x) for p in PRECISIONS}
    title = f"one layer {WIDTH} x {WIDTH}, {TOKENS} tokens"
    yield race(title, ("nn.Linear", step_of(layer, x)), contestants, max(rounds, 30))
