"""10,000 training steps of each policy hold as much memory as 5,000."""

import gc
import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

import dsq
from analysis.stash.allocator.counted import Count, compiler, figures

STEPS = 10_000
SETTLED = 5_000  #: bfloat16 holds 16 KB more by then than after 2,000 steps, and 1 KB more after 10,000
POLICIES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfp": {"rounding": "stochastic"},
    "mesa": {},
    "gact": {"adapt_interval": 500},
    "selective": {},
    "wtacrs": {},
    "checkpoint": {"segments": "^[04]$"},
    "dsq.convert": {"stash": "all", "rounding": "stochastic"},
}


def bytes_after(policy: str) -> tuple[int, int]:
    """Bytes that malloc has given out after SETTLED and after STEPS steps."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)
    model, x, count = nn.Sequential(*layers), torch.randn(40, 16), Count()
    dynamic = dsq.DynamicPrecision(model, dsq.DSQConfig(**POLICIES[policy])) if policy == "dsq.convert" else None
    if dynamic is None:
        dsq.stash.apply(model, policy, **POLICIES[policy])
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


@pytest.mark.soak
@pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_steps_hold_what_five_thousand_do(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "malloc")  # Python's own objects are counted too
    before, after = figures(__spec__.name, policy)
    assert after - before < STEPS - SETTLED  # less than a byte a step


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(bytes_after(sys.argv[1])))
