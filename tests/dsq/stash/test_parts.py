"""Parts of a model that a loop calls by themselves, as for a loss in chunks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq

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


def net(policy: str, **options: object) -> tuple[Net, dsq.stash.Controller]:
    torch.manual_seed(0)
    model = Net()
    return model, dsq.stash.apply(model, policy, **options)


def held(model: Net, whole: bool) -> tuple[int, list[torch.Tensor]]:
    model.zero_grad()

    def loss() -> torch.Tensor:
        return (model(X) if whole else F.linear(model.hidden(X), model.head.weight, model.head.bias)).square().mean()

    nbytes = dsq.stash.measure(loss).nbytes
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
def test_what_acts_on_whole_forwards_alone_leaves_parts_exact(policy: str) -> None:
    model, controller = net(policy)
    for _ in range(2):
        held(model, True)
    found, _ = [held(model, False)[0] for _ in range(2)]
    assert found == held(Net(), False)[0]
    controller.remove()
    assert [type(module) for module in model.modules()] == [type(module) for module in Net().modules()]


def test_parts_that_follow_one_another_are_one_forward() -> None:
    model, controller = net("bfp", bits=4)
    model(X)
    whole = controller.report()
    for _ in range(2):
        model.hidden(X)
        assert controller.report().raw_bytes > 0.8 * whole.raw_bytes
        assert controller.report().raw_bytes <= whole.raw_bytes + 2 * 2 * X.nbytes


def test_removed_and_copied() -> None:
    model, controller = net("bfp", bits=4)
    plain = held(Net(), False)[0]
    twin = copy.deepcopy(model)
    assert held(twin, False)[0] < 0.5 * plain
    controller.remove(twin)
    assert [type(module) for module in twin.modules()] == [type(module) for module in Net().modules()]
    assert held(twin, False)[0] == plain
    assert held(model, False)[0] < 0.5 * plain
    controller.remove()
    assert held(model, False)[0] == plain
    assert all("_dsq" not in name for module in model.modules() for name in vars(module))
