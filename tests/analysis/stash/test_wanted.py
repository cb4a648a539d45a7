"""Who wants a gradient decides what is kept; torchvision itself is not needed here."""

import pytest
import torch
from torch import nn

import dsq
from analysis.stash.wanted import PAPER, WANTED, step, want


def test_fewer_leaves_keep_less_and_get_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))).eval()
    x = torch.randn(2, 3, 32, 32)
    kept = {}
    for name, kinds in WANTED.items():
        leaves = want(model, x, kinds)
        plain, expected = step(model, x, leaves)
        controller = dsq.stash.apply(model, "selective")
        kept[name], gradients = step(model, x, leaves)
        controller.remove()
        assert all(map(torch.equal, gradients, expected))
        assert kept[name] < plain
    assert kept["input"] < 0.1 * kept["all"]
    assert kept["input"] < kept["norms"] < kept["all"]
    assert kept["input"] < kept["convolutions"] <= kept["all"]


@pytest.mark.parametrize("shares", PAPER.values(), ids=PAPER)
def test_the_papers_shares_are_of_all_who_are_wanted(shares: tuple[float | None, ...]) -> None:
    assert len(shares) == len(WANTED)
