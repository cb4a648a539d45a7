"""A training step of six transformer blocks in bfloat16: under autocast, and of a model that is in it altogether."""

import copy
from collections.abc import Iterator

import torch

from analysis.bench.step import BATCH, LENGTH, PRECISIONS, WIDTH, converted, step_of
from analysis.models import encoder
from analysis.timing import Call, Race, race

LEVELS = (*PRECISIONS, "[8,8,8,16]")


def races(rounds: int) -> Iterator[Race]:
    """Converted models under autocast against the plain one, and in bfloat16 against the plain one."""
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    title = f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, {torch.get_num_threads()} threads"
    mixed = {
        f"dsq {precision}, autocast": step_of(converted(model, levels=precision), x, autocast=True)
        for precision in LEVELS
    }
    yield race(title, ("bf16 autocast", step_of(model, x, autocast=True)), mixed | {"fp32": step_of(model, x)}, rounds)
    model, x = copy.deepcopy(model).bfloat16(), x.bfloat16()
    whole: dict[str, Call] = {
        f"dsq {precision}, bf16 model": step_of(converted(model, levels=precision), x) for precision in LEVELS
    }
    yield race(title, ("bf16 model", step_of(model, x)), whole, rounds)
