"""A training step of six transformer blocks (forward and backward), and the cost of dsq.Linear on a tiny layer."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

import dsq
from analysis.models import encoder

from .racing import Call, Race, race

BATCH, LENGTH, WIDTH = 8, 128, 512
PRECISIONS = ("[2,2,2,16]", "[4,4,4,16]", "[8,8,8,16]", "[16,4,4,16]")
TINY_WIDTH, TINY_TOKENS = 64, 32


def races(rounds: int) -> Iterator[Race]:
    """The step against fp32; then one small layer against nn.Linear."""
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    title = f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, {torch.get_num_threads()} threads"
    yield race(title, ("fp32", _step(model, x)), _contestants(model, x), rounds)
    tiny, x = nn.Linear(TINY_WIDTH, TINY_WIDTH), torch.randn(TINY_TOKENS, TINY_WIDTH, requires_grad=True)
    layers = {p: _step(_converted(tiny, levels=p), x) for p in PRECISIONS}
    title = f"one layer {TINY_WIDTH} x {TINY_WIDTH}, {TINY_TOKENS} tokens"
    yield race(title, ("nn.Linear", _step(tiny, x)), layers, max(rounds, 30))


def _contestants(model: nn.Module, x: torch.Tensor) -> dict[str, Call]:
    calls = {"bf16 autocast": _step(model, x, autocast=True)}
    for precision in PRECISIONS:
        calls[f"dsq bfp {precision}"] = _step(_converted(model, levels=precision), x)
        calls[f"dsq fixed {precision}"] = _step(_converted(model, levels=precision, format="fixed"), x)
    stochastic = _converted(model, levels=PRECISIONS[0], rounding="stochastic")
    calls[f"dsq bfp {PRECISIONS[0]}, stochastic"] = _step(stochastic, x)
    calls[f"dsq bfp {PRECISIONS[0]}, GEMMs in float32"] = _step(
        _converted(model, levels=PRECISIONS[0], units="float32"), x
    )
    return calls


def _converted(model: nn.Module, **options: str) -> nn.Module:
    return dsq.convert(copy.deepcopy(model), dsq.DSQConfig(**options))  # type: ignore[arg-type]


def _step(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> Call:
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
        model.zero_grad()

    return step
