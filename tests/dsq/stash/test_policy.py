"""The policies and their pairs, refusals in a line, and parts of a model that a loop calls by themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsq.stash import Controller, apply, measure, policies
from dsq.stash.controller import applied
from tests.dsq.stash.every_policy import NAMES, PAIRS, small, snapshot, train


def test_all_policies_are_registered():
    assert policies() == NAMES


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs(pair):
    for order in (pair, pair[::-1]):
        model = small()
        before = snapshot(model)
        controllers = [apply(model, name) for name in order]
        losses = train(model)
        assert losses[-1] < losses[0]
        for controller in controllers:
            controller.remove()
        assert snapshot(model) == before
        assert applied(model) == {}


def test_pairs_of_policies_are_those_that_share_no_tensors():
    partners = {a: {b for pair in PAIRS for b in pair if a in pair and b != a} for a in NAMES}
    assert partners["checkpoint"] == {"bfp", "gact", "mesa", "selective", "wtacrs"}
    assert partners["bfp"] == {"checkpoint", "selective", "wtacrs"}
    assert "gact" not in partners["mesa"]


def test_a_policy_around_a_submodule_counts_as_one_inside_does():
    model = nn.Sequential(small(), small())
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="'gact' cannot share a model with 'bfp'"):
        apply(model[0], "gact")
    apply(model[0], "selective")
    controller.remove()
    apply(model[0], "bfp")
    apply(model[1], "gact")  # beside it, not inside


X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
        self.head = nn.Linear(64, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


def net(policy: str, **options: object) -> tuple[Net, Controller]:
    torch.manual_seed(0)
    model = Net()
    return model, apply(model, policy, **options)


def held(model: Net, whole: bool) -> tuple[int, list[torch.Tensor]]:
    model.zero_grad()

    def loss() -> torch.Tensor:
        return (model(X) if whole else F.linear(model.hidden(X), model.head.weight, model.head.bias)).square().mean()

    nbytes = measure(loss).nbytes
    torch.manual_seed(1)
    loss().backward()
    return nbytes, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["bfp", "selective"])
def test_a_method_that_is_not_forward_keeps_no_more(policy: str) -> None:
    (whole, expected), (parts, found) = held(net(policy)[0], True), held(net(policy)[0], False)
    assert parts < whole + 2 * 2 * X.nbytes  # the sums that blocks begin with are another block's output
    if policy == "bfp":
        assert parts < 0.4 * held(Net(), False)[0]
        for a, b in zip(found, expected, strict=True):
            assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


@pytest.mark.parametrize("policy", ["mesa", "gact"])
def test_policies_of_whole_forwards_leave_parts_exact(policy: str) -> None:
    model, _ = net(policy)
    for _ in range(2):
        held(model, True)
    assert held(model, False)[0] == held(Net(), False)[0]


def test_parts_that_follow_one_another_are_one_forward() -> None:
    model, controller = net("bfp", bits=4)
    model(X)
    whole = controller.report()
    for _ in range(2):
        model.hidden(X)
        assert controller.report().raw_bytes > 0.8 * whole.raw_bytes
        assert controller.report().raw_bytes <= whole.raw_bytes + 2 * 2 * X.nbytes
