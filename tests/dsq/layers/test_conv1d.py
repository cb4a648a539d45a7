"""GPT-2's Conv1D, converted, is the linear layer of the transposed weight."""

import pytest
import torch

import dsq

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


@pytest.mark.parametrize("levels", ["[4,4,4,16]", "[4,4,4,8]", "[2,2,2,8]"])
def test_it_is_a_linear_layer_of_the_transposed_weight(levels):
    config = dsq.DSQConfig(levels=levels)
    net, linear = Conv1D(48, 32), torch.nn.Linear(32, 48)
    linear.weight.data, linear.bias.data = net.weight.data.t().contiguous(), net.bias.data
    names = list(net.state_dict())
    dsq.convert(net, config), dsq.convert(linear, config)
    assert isinstance(net, Conv1D)
    assert repr(net).startswith(f"Conv1D(nf=48, nx=32, precision={levels}")
    assert list(net.state_dict()) == names
    x, dy = torch.randn(2, 16, 32, requires_grad=True), torch.randn(2, 16, 48)
    results = []
    for layer in (net, linear):
        x.grad = None
        y = layer(x)
        y.backward(dy)
        results.append((y, x.grad, layer.bias.grad, layer.weight.grad if layer is linear else layer.weight.grad.t()))
    assert all(map(torch.equal, *results))
    assert type(dsq.unconvert(net)) is Conv1D


def test_at_8_bits_the_weight_s_gradient_is_not_copied():
    net, made = dsq.convert(Conv1D(48, 32), dsq.DSQConfig(levels="[4,4,4,8]")), []
    net.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    net(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert made == [net.weight.grad.data_ptr()]
