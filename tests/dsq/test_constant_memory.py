"""20,000 training steps of each policy hold as much memory as 10,000."""

import gc
import json
import sys

import pytest
import torch
from torch import nn

import dsq
from analysis.memory.allocator import Count, compiler, figures
from analysis.models import attach

STEPS = 20_000
SETTLED = 10_000  #: a model without a policy, too, comes to hold 15 KB more, once, in its first 7,500 steps
BYTES_A_STEP = 4  #: what is held goes up and down by 20 KB; an object that each step left behind would take 16 and more
SETUPS = ("snvint 4", "mesa", "gact 4", "selective", "wtacrs 0.3", "checkpoint ^[04]$", "[8,4,8,8] all stochastic")


def bytes_after(setup: str) -> tuple[int, int]:
    """Bytes that malloc has given out after SETTLED and after STEPS steps."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)
    model, x, count = nn.Sequential(*layers), torch.randn(40, 16), Count()
    attach(model, setup)
    config = dsq.DSQConfig("[8,4,8,8]", stash="all", rounding="stochastic")
    dynamic = dsq.DynamicPrecision(model, config) if dsq.converted(model) else None
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    held = []
    for step in range(1, STEPS + 1):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dynamic is not None:
            dynamic.record(1, 40)
            dynamic.step(1.0 / step) if step % 100 == 0 else dynamic.metrics()
        if step in (SETTLED, STEPS):
            gc.collect()
            held.append(count.live())
    return held[0], held[1]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")
@pytest.mark.parametrize("setup", SETUPS)
def test_ten_thousand_steps_more_hold_nothing_more(setup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "malloc")  # Python's own objects are counted too
    before, after = figures(__spec__.name, setup)
    assert abs(after - before) < BYTES_A_STEP * (STEPS - SETTLED)  # less: the count misses what is given out


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(bytes_after(sys.argv[1])))
