"""A training step of six transformer blocks, forward and backward, against fp32: converted models inside
``dsq.fused_attention``, plain ones by PyTorch alone, but for one under autocast.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import dsq
from analysis.models import encoder
from analysis.timing import Call, Race, race
from dsq.formats import DEFAULT

BATCH, LENGTH, WIDTH = 8, 128, 512
NARROW_BATCH, NARROW_LENGTH, NARROW_WIDTH = 16, 64, 128
PRECISIONS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]", "[4,4,4,8]", "[4,3,3,8]", "[8,4,4,8]")
#: those that are timed with every other saved tensor packed too
PACKED = PRECISIONS[1:]
#: those that are timed under autocast too
MIXED = ("[4,4,4,16]", "[4,4,4,8]", "[8,4,4,8]")


def races(rounds: int) -> Iterator[Race]:
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    title = f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, {torch.get_num_threads()} threads"
    calls = _contestants(model, x)
    for name in ("bfp", "sbfp", "fixed"):
        calls[f"dsq {name} {PRECISIONS[1]}"] = inside(converted(model, levels=PRECISIONS[1], format=name), x)
    stochastic = converted(model, levels=PRECISIONS[0], rounding="stochastic")
    calls[f"dsq {DEFAULT} {PRECISIONS[0]}, stochastic"] = inside(stochastic, x)
    plain_units = converted(model, levels=PRECISIONS[0], units="float32")
    calls[f"dsq {DEFAULT} {PRECISIONS[0]}, GEMMs in float32"] = inside(plain_units, x)
    yield race(title, ("fp32", step_of(model, x)), calls, rounds)
    model = encoder(width=NARROW_WIDTH, heads=4, ffn=4 * NARROW_WIDTH, sdpa=True)
    x = torch.randn(NARROW_BATCH, NARROW_LENGTH, NARROW_WIDTH)
    title = f"six blocks, d {NARROW_WIDTH}, {NARROW_BATCH * NARROW_LENGTH} tokens, {torch.get_num_threads()} threads"
    yield race(title, ("fp32", step_of(model, x)), _contestants(model, x), rounds)


def _contestants(model: nn.Module, x: torch.Tensor) -> dict[str, Call]:
    calls = {
        "bf16 autocast": step_of(model, x, autocast=True),
        "bf16 autocast, dsq's attention": inside(model, x, autocast=True),
    }
    for precision in PRECISIONS:
        quantised = converted(model, levels=precision)
        calls[f"dsq {DEFAULT} {precision}"] = inside(quantised, x)
        if precision in MIXED:
            calls[f"dsq {DEFAULT} {precision}, autocast"] = inside(quantised, x, autocast=True)
        if precision in PACKED:
            packed = converted(model, levels=precision, stash="all")
            calls[f"dsq {DEFAULT} {precision}, whole stash packed"] = inside(packed, x)
    return calls


def converted(model: nn.Module, **options: str) -> nn.Module:
    """A converted copy."""
    return dsq.convert(copy.deepcopy(model), dsq.DSQConfig(**options))  # type: ignore[arg-type]


def step_of(
    model: nn.Module,
    x: torch.Tensor,
    autocast: bool = False,
    attention: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Call:
    """Forward, backward of a mean of squares, gradients dropped; all inside ``attention()``."""
    loss = loss_of(model, x, autocast)

    def step() -> None:
        with attention():
            loss().backward()
        model.zero_grad()

    return step


def inside(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> Call:
    """The step inside ``dsq.fused_attention``."""
    return step_of(model, x, autocast, dsq.fused_attention)


def loss_of(model: nn.Module, x: torch.Tensor, autocast: bool = False) -> Callable[[], torch.Tensor]:
    """The forward of the step's loss."""

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y: torch.Tensor = model(x)
        return y.float().square().mean()

    return loss
