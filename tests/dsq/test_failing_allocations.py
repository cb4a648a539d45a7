"""Out of memory at any allocation of a step: an exception, nothing kept, and the next step has the right bits.

Run as a module, under the counting malloc, it prints the outcomes as JSON.
"""

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsq
from analysis.memory.allocator import Count, compiler, figures
from analysis.models import attach
from tests.dsq.stash.test_held import MODELS, POLICIES

Step = Callable[[], list[Tensor]]


def training(model: nn.Module, forward: Callable[[], Tensor]) -> Step:
    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = forward()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def pack() -> Step:
    x, formats = torch.randn(64, 96), (dsq.BFP(4), dsq.FixedPoint(7))
    return lambda: [dsq.pack(x, fmt, dim).unpack() for fmt in formats for dim in (0, 1)]


def converted(stash: str) -> Step:
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 16))
    dsq.convert(model, dsq.DSQConfig("[4,4,4,16]", stash=stash))
    x = torch.randn(40, 48)
    return training(model, lambda: model(x).square().sum())


def under_policies(model_name: str, setup: str) -> Step:
    """Each step begins with the policies' estimates and seeds of the first."""
    model, forward = MODELS[model_name]()
    policies = attach(model, setup)
    step = training(model, forward)
    step()
    states = [policy.state_dict() for policy in policies]

    def resumed() -> list[Tensor]:
        for policy, state in zip(policies, states, strict=True):
            policy.load_state_dict(state)
        return step()

    return resumed


CASES: dict[str, Callable[[], Step]] = {
    "pack": pack,
    "linear": lambda: converted("linears"),
    "linear, all stashed": lambda: converted("all"),
    **{f"encoder/{policies}": lambda p=policies: under_policies("encoder", p) for policies in POLICIES},
}


def failures(step: Step) -> Iterator[tuple[int, list[Tensor] | None]]:
    """The number of each allocation of a step, and what the step gave when it failed; None: an exception."""
    count, number = Count(), 0
    while True:
        number += 1
        count.fail(number)
        try:
            result = step()
        except (RuntimeError, MemoryError):
            result = None
        failed = count.failed()
        count.fail(0)
        if not failed:
            return
        yield number, result


def sweep(step: Step) -> dict[str, Any]:
    """Fail every allocation of ``step``, each time followed by a step in which none fails.

    raised: failures that ended in an exception. wrong: those after which a step, or this one, gave other bits. leaked:
    bytes held after the last that were not held after the first.
    """
    for _ in range(2):
        right = [tensor.clone() for tensor in step()]
    outcome, wrong, count, held = Counter[str](), [], Count(), 0
    gc.freeze()  # what is there already need not be searched after every failure

    def same(result: list[Tensor]) -> bool:
        return len(result) == len(right) and all(map(torch.equal, result, right))

    for number, result in failures(step):
        outcome["allocations"] += 1
        outcome["raised"] += result is None
        if not (result is None or same(result)) or not same(step()):
            wrong.append(number)
        del result
        gc.collect()
        held = held or count.live()
    gc.collect()  # after the step in which there was no more to fail
    return {**outcome, "wrong": wrong, "leaked": count.live() - held}


QUICK = [name for name in CASES if not name.startswith("encoder")]
LONG = [name for name in CASES if name.startswith("encoder") and not name.endswith("gact 4")]


@pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")
@pytest.mark.parametrize("names", [QUICK, *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in LONG)])
def test_every_allocation_fails_once(names: list[str]) -> None:
    for name, outcome in figures(__spec__.name, *names).items():
        assert outcome["allocations"] > 10, name
        assert outcome["raised"] == outcome["allocations"], name
        assert outcome["wrong"] == [], name
        assert outcome["leaked"] < 4096, name  # less than any of its tensors, a failure


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes = {}
    for case in sys.argv[1:]:
        torch.manual_seed(0)
        outcomes[case] = sweep(CASES[case]())
    print(json.dumps(outcomes))
