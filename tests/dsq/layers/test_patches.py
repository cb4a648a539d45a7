"""A convolution that cuts patches is a linear layer over them; others stay."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dsq


def image(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (3, 17, 27)])
@pytest.mark.parametrize("bias", [False, True])
def test_at_full_width_it_is_the_convolution(shape, bias):
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 20, (4, 6), stride=(4, 6), bias=bias)
    net = dsq.convert(copy.deepcopy(plain), dsq.DSQConfig(levels="[32,32,32,32]"))
    x, results = image(*shape), []
    for layer in (plain, net):
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert type(dsq.unconvert(net)) is nn.Conv2d


def test_quantised_it_is_the_linear_layer_of_its_patches():
    torch.manual_seed(0)
    net = dsq.convert(nn.Conv2d(3, 20, 4, stride=4), dsq.DSQConfig(levels="[4,4,4,16]"))
    x = image(2, 3, 16, 16)
    patches = nn.functional.unfold(x, 4, stride=4).mT  # (B, patches, values)
    y = dsq.functional.linear(patches, net.weight.flatten(1), net.bias, "[4,4,4,16]")
    assert torch.equal(net(x), y.mT.unflatten(2, (4, 4)))
    found, expected = (torch.autograd.grad(z.square().sum(), (x, net.weight)) for z in (net(x), y))
    assert all(map(torch.equal, found, expected))


def test_the_result_is_laid_out_as_that_of_the_convolution():
    net = nn.Conv2d(3, 4, 1)
    x = torch.randn(2, 3, 8, 8)
    for given in (x, x.to(memory_format=torch.channels_last), x[0]):
        strides = net(given).stride()
        dsq.convert(net)
        assert net(given).stride() == strides
        dsq.unconvert(net)


@pytest.mark.parametrize("shape", [(2, 3, 16, 2), (2, 5, 16, 16), (3, 2, 3, 16, 16)])
def test_what_the_convolution_refuses_is_refused(shape):
    net = dsq.convert(nn.Conv2d(3, 20, 4, stride=4))
    with pytest.raises(ValueError, match=r"input must be \(B, 3, at least 4, at least 4\)"):
        net(torch.randn(shape))


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": 4, "padding": 1}, {"stride": 4, "dilation": 2}, {"stride": 4, "groups": 2}]
)
def test_others_stay(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = dsq.convert(nn.Conv2d(4, 20, 4, **options))
    assert type(net) is nn.Conv2d
