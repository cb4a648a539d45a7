"""A training step of six transformer blocks in bfloat16: under autocast, and of a model that is in it altogether."""

import copy
from collections.abc import Iterator

import torch

from analysis.bench.models import encoder
from analysis.bench.race import Race, race
from analysis.bench.step import BATCH, LENGTH, WIDTH, converted, step_of
from analysis.bench.timer import Call

PRECISIONS = ("[2,2,2,16]", "[4,4,4,16]", "[8,8,8,16]", "[16,4,4,16]")


def races(rounds: int) -> Iterator[Race]:
    """Each against its own: under autocast, then a model in bfloat16; float32 beside both."""
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    whole, whole_x = copy.deepcopy(model).bfloat16(), x.bfloat16()
    title = f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, {torch.get_num_threads()} threads"
    float32: dict[str, Call] = {"fp32": step_of(model, x), "dsq [4,4,4,16], fp32": step_of(_at(model, "[4,4,4,16]"), x)}
    autocast = {f"dsq {p}, autocast": step_of(_at(model, p), x, autocast=True) for p in PRECISIONS}
    yield race(title, ("bf16 autocast", step_of(model, x, autocast=True)), autocast | float32, rounds)
    bf16 = {f"dsq {p}, bf16 model": step_of(_at(whole, p), whole_x) for p in PRECISIONS}
    yield race(title, ("bf16 model", step_of(whole, whole_x)), bf16 | float32, rounds)


def _at(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    return converted(model, levels=precision)
