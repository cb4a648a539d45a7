"""Experts and patches: each product by the equations, what they keep, and what is refused or left."""

import warnings

import pytest
import torch
from torch import nn

import dsq
from tests.dsq.gradients import error, saving, step
from tests.dsq.layers.kinds import EXPERTS, TOKENS, WIDTH, batch, drawn, made


def test_quantized_it_is_the_linear_layer_of_its_patches():
    torch.manual_seed(0)
    net = dsq.convert(nn.Conv2d(3, 20, 4, stride=4), dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    x = drawn(2, 3, 16, 16)
    patches = nn.functional.unfold(x, 4, stride=4).mT  # (B, patches, values)
    y = dsq.functional.linear(patches, net.weight.flatten(1), net.bias, "[4,4,4,16]")
    assert torch.equal(net(x), y.mT.unflatten(2, (4, 4)))
    actual, expected = (torch.autograd.grad(z.square().sum(), (x, net.weight)) for z in (net(x), y))
    assert all(map(torch.equal, actual, expected))


def test_the_result_is_laid_out_as_that_of_the_convolution():
    net = nn.Conv2d(3, 4, 1)
    x = torch.randn(2, 3, 8, 8)
    for image in (x, x.to(memory_format=torch.channels_last), x[0]):
        strides = net(image).stride()
        dsq.convert(net, stash="linears")
        assert net(image).stride() == strides
        dsq.unconvert(net)


def test_a_map_of_one_place_stays_plain():
    net, x = nn.Conv2d(32, 24, 1), torch.randn(4, 32, 1, 2)
    pooled, wider = net(x[..., :1]), net(x)
    dsq.convert(net, stash="linears")
    assert torch.equal(net(x[..., :1]), pooled)
    assert not torch.equal(net(x), wider)


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": 4, "padding": 1}, {"stride": 4, "dilation": 2}, {"stride": 4, "groups": 2}]
)
def test_other_convolutions_stay(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = dsq.convert(nn.Conv2d(4, 20, 4, **options), stash="linears")
    assert type(net) is nn.Conv2d


CONFIG = dsq.DSQConfig(levels="[4,4,4,16]", stash="linears")


def test_tokens_of_other_ranks_experts_give_nothing_and_the_last_products_are_kept_once():
    net = dsq.convert(made("mixtral"), CONFIG)
    x, choices, weights = batch()
    local = choices.clone()
    local[:, 1] = EXPERTS
    one = net(x, choices[:, :1], weights[:, :1])
    assert torch.equal(net(x, local, weights), one)
    # the weights' gradient needs them; putting them back into the order of the tokens needs no values
    y, saved_tensors = saving(net, x, choices, weights)
    assert y.requires_grad
    assert len({x.untyped_storage()._cdata for x in saved_tensors if x.shape == (2 * TOKENS, WIDTH)}) == 1


@pytest.mark.filterwarnings("ignore:q3 is under 16")
def test_each_expert_is_the_linear_layers_of_its_tokens():
    config = dsq.DSQConfig(levels="[5,4,3,8]", format="bfp", stash="linears")
    net, (x, choices, weights), y = dsq.convert(made("mixtral"), config), batch(), 0
    for e in range(EXPERTS):
        tokens, place = (choices == e).nonzero(as_tuple=True)
        gate, up = dsq.functional.linear(x[tokens], net.gate_up_proj[e], None, config.at(0)).chunk(2, -1)
        down = dsq.functional.linear(net.act_fn(gate) * up, net.down_proj[e], None, config.at(0))
        y = y + torch.zeros_like(x).index_add(0, tokens, weights[tokens, place, None] * down)
    leaves, dy = (x, weights, net.gate_up_proj, net.down_proj), torch.randn(TOKENS, WIDTH)
    actual, expected = ((output, *torch.autograd.grad(output, leaves, dy)) for output in (net(x, choices, weights), y))
    slack = 2.0**-5  # in Q3 a tie may fall the other way
    for one, other, most in zip(actual, expected, (0, slack, 0, slack, 0), strict=True):
        assert (one - other).abs().max() <= (1e-5 + most) * other.abs().max()
        torch.testing.assert_close(one.norm(), other.norm(), rtol=1e-4, atol=0)
    assert not actual[-1][3].any()


def test_compiled_in_one_graph_for_any_counts_of_tokens(fresh_compiler):
    net = dsq.convert(made("mixtral"), dsq.DSQConfig("[4,4,4,16]", stash="all"))
    x, choices, weights = batch()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, error_on_recompile=True):
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for routes in (choices.contiguous(), 3 - choices):
            (y, *gradients), (same_y, *exact) = (step(net, x, routes, weights, run=run) for run in (compiled, net))
            assert torch.equal(y, same_y)
            assert all(g is None or error(gradient, g) < 0.1 for gradient, g in zip(gradients, exact, strict=True))
