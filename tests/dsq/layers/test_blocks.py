"""Blocks that stay in floating point at both ends of a model, as recipes have them."""

import copy

import pytest
import torch
from torch import nn

import dsq


def model(blocks=6):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, blocks), nn.Linear(32, 100))


def blocks_of(net):
    return sorted({int(name.split(".")[2]) for name in dsq.converted(net) if name.startswith("1.layers")})


@pytest.mark.parametrize(
    ("ends", "blocks"), [("1,2", [1, 2, 3]), ("0,0", [0, 1, 2, 3, 4, 5]), ("0.032,0.129", [0, 1, 2, 3, 4])]
)
def test_blocks_at_both_ends_and_what_is_in_none_stay(ends, blocks):
    net = dsq.convert(model(), "[8,4,8,8]", plain_ends=ends)
    assert blocks_of(net) == blocks
    assert type(net[0]) is type(net[2]) is nn.Linear


def test_a_recipe_has_its_own_ends_and_options_have_the_last_word():
    assert dsq.DSQConfig.of("nvfp4-nvidia").plain_ends == "0.032,0.129"
    assert blocks_of(dsq.convert(model(), "nvfp4-nvidia")) == [0, 1, 2, 3, 4]
    assert blocks_of(dsq.convert(model(), "nvfp4-nvidia", plain_ends="2,2")) == [2, 3]
    assert dsq.DSQConfig("[8,4,8,8]").plain_ends is None


def test_a_model_without_blocks_is_converted_whole_with_a_warning():
    with pytest.warns(UserWarning, match="plain_ends='0,0' finds no blocks"):
        net = dsq.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "mxfp8-nvidia")
    assert len(dsq.converted(net)) == 2


def test_blocks_may_stand_beside_other_modules_and_be_of_two_classes_in_turn():
    blocks = [nn.TransformerEncoderLayer(32, 2, 64), nn.Sequential(nn.Linear(32, 32), nn.GELU())] * 3
    net = nn.Sequential(nn.Linear(16, 32), *map(copy.deepcopy, blocks), nn.LayerNorm(32), nn.Linear(32, 100))
    names = dsq.converted(dsq.convert(net, "mxfp4", plain_ends="1,2"))
    assert {name.split(".")[0] for name in names} == {"2", "3", "4"}


class LayerDrop(nn.ModuleList):
    """As fairseq's: in training its iterator leaves out blocks."""

    def __iter__(self):
        return iter(list(super().__iter__())[::2])


def test_blocks_that_a_forward_may_drop_count_too():
    net = model()
    net[1].layers = LayerDrop(list(net[1].layers))
    assert blocks_of(dsq.convert(net, "[8,4,8,8]", plain_ends="1,2")) == [1, 2, 3]


def test_a_converted_recipe_trains():
    net, x = model(), torch.randn(4, 10, 16)
    dynamic = dsq.DynamicPrecision(net, "nvfp4-nvidia bf16", total_updates=10, rise_at=0.8)
    net.train()
    for _ in range(10):
        net(x).square().mean().backward()
        dynamic.record()
    assert str(dynamic.scheduler.precision) == "bf16"
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("ends", ["2", "1,-1", "1.5,0", "a,b", "1,2,3", "nan,0"])
def test_other_ends_are_refused(ends):
    with pytest.raises(ValueError, match="plain_ends must be two numbers of blocks"):
        dsq.DSQConfig("[8,4,8,8]", plain_ends=ends)
