"""A training step of six transformer blocks, forward and backward, against fp32."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

import dsq
from analysis.models import encoder
from analysis.timing.race import Race, race
from analysis.timing.timer import Call
from dsq.formats import DEFAULT
from dsq.kernels.cpu.attention import pytorch_attention
from dsq.linear import Quantised

BATCH, LENGTH, WIDTH = 8, 128, 512
NARROW_BATCH, NARROW_LENGTH, NARROW_WIDTH = 16, 64, 128
PRECISIONS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]", "[4,4,4,8]", "[8,4,4,8]")
#: those that are timed with every other saved tensor packed too
PACKED = ("[4,4,4,16]", "[16,4,4,16]", "[4,4,4,8]")
#: those that are timed under autocast too
MIXED = ("[4,4,4,16]", "[4,4,4,8]", "[8,4,4,8]")


def races(rounds: int) -> Iterator[Race]:
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    title = f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, {torch.get_num_threads()} threads"
    calls = _contestants(model, x)
    for name in ("bfp", "fixed"):
        calls[f"dsq {name} {PRECISIONS[1]}"] = step_of(converted(model, levels=PRECISIONS[1], format=name), x)
    stochastic = converted(model, levels=PRECISIONS[0], rounding="stochastic")
    calls[f"dsq {DEFAULT} {PRECISIONS[0]}, stochastic"] = step_of(stochastic, x)
    plain_units = converted(model, levels=PRECISIONS[0], units="float32")
    calls[f"dsq {DEFAULT} {PRECISIONS[0]}, GEMMs in float32"] = step_of(plain_units, x)
    yield race(title, ("fp32", step_of(model, x)), calls, rounds)
    model = encoder(width=NARROW_WIDTH, heads=4, ffn=4 * NARROW_WIDTH, sdpa=True)
    x = torch.randn(NARROW_BATCH, NARROW_LENGTH, NARROW_WIDTH)
    title = f"six blocks, d {NARROW_WIDTH}, {NARROW_BATCH * NARROW_LENGTH} tokens, {torch.get_num_threads()} threads"
    yield race(title, ("fp32", step_of(model, x)), _contestants(model, x), rounds)


def _contestants(model: nn.Module, x: torch.Tensor) -> dict[str, Call]:
    calls = {"bf16 autocast": step_of(model, x, autocast=True)}
    for precision in PRECISIONS:
        quantised = converted(model, levels=precision)
        calls[f"dsq {DEFAULT} {precision}"] = step_of(quantised, x)
        if precision in MIXED:
            calls[f"dsq {DEFAULT} {precision}, autocast"] = step_of(quantised, x, autocast=True)
        if precision in PACKED:
            packed = converted(model, levels=precision, stash="all")
            calls[f"dsq {DEFAULT} {precision}, whole stash packed"] = step_of(packed, x)
    return calls


def converted(model: nn.Module, **options: str) -> nn.Module:
    """A converted copy."""
    return dsq.convert(copy.deepcopy(model), dsq.DSQConfig(**options))  # type: ignore[arg-type]


def step_of(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> Call:
    """Forward, backward of a mean of squares, gradients dropped; a model without quantised layers has PyTorch's
    attention."""
    attention = nullcontext if any(isinstance(m, Quantised) for m in model.modules()) else pytorch_attention

    def step() -> None:
        with attention():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = model(x)
            y.float().square().mean().backward()
        model.zero_grad()

    return step
