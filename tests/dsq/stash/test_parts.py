"""Methods of a model that are not its forward, as for a loss in chunks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.stash.controller import under_policies

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


def held(model: Net, method: str) -> int:
    def loss() -> torch.Tensor:
        if method == "forward":
            return model(X).square().mean()
        hidden = under_policies(model, model.hidden, X) if method == "under policies" else model.hidden(X)
        return F.linear(hidden, model.head.weight, model.head.bias).square().mean()

    return dsq.stash.measure(loss).nbytes


@pytest.mark.parametrize("policy", ["bfp", "mesa", "gact"])
def test_another_method_is_exact_unless_it_is_called_under_the_policies(policy: str) -> None:
    model, controller = net(policy)
    assert held(model, "hidden") == held(Net(), "hidden")
    assert held(model, "under policies") < 0.5 * held(Net(), "hidden")
    assert held(model, "under policies") <= held(model, "forward") + X.nbytes  # what the head reads
    controller.remove()
    assert held(model, "under policies") == held(Net(), "hidden")


def test_removed_and_copied() -> None:
    model, controller = net("bfp", bits=4)
    plain = held(Net(), "forward")
    twin = copy.deepcopy(model)
    assert held(twin, "forward") < 0.5 * plain
    controller.remove(twin)
    assert [type(module) for module in twin.modules()] == [type(module) for module in Net().modules()]
    assert held(twin, "forward") == plain
    assert held(model, "forward") < 0.5 * plain
    controller.remove()
    assert held(model, "forward") == plain
    assert all("_dsq" not in name for module in model.modules() for name in vars(module))
