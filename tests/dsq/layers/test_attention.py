"""nn.MultiheadAttention converted is nn.MultiheadAttention: masks, shapes, gradients."""

import copy

import pytest
import torch
from torch import nn

import dsq

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")
FLOAT = dsq.DSQConfig(levels="[32,32,32,32]", stash="linears")


def pair(**options):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, **options)
    return plain, dsq.convert(copy.deepcopy(plain), FLOAT)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "options, masks",
    [
        ({}, {}),
        ({}, {"attn_mask": CAUSAL, "is_causal": True}),
        ({}, {"attn_mask": CAUSAL.bool(), "key_padding_mask": True}),
        ({"bias": False}, {"key_padding_mask": True, "attn_mask": torch.randn(12, 6, 6)}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": True, "attn_mask": CAUSAL.bool()}),
        ({"kdim": 16, "vdim": 24}, {}),
    ],
)
def test_at_full_width_it_gives_what_the_plain_one_gives(batch_first, need_weights, options, masks):
    plain, converted = pair(batch_first=batch_first, **options)
    masks = dict(masks, need_weights=need_weights)
    if masks.get("key_padding_mask"):
        masks["key_padding_mask"] = torch.arange(6) >= torch.tensor([[6], [4], [5]])
    x = torch.randn(6, 3, 32, requires_grad=True)
    y = [torch.randn(6, 3, d) for d in (plain.kdim, plain.vdim)]
    inputs = (x, x, x) if plain.kdim == 32 else (x, *y)
    if batch_first:
        inputs = tuple(t.transpose(0, 1) for t in inputs)
        inputs = (inputs[0],) * 3 if plain.kdim == 32 else inputs
    results = []
    for net in (plain, converted):
        x.grad = None
        out, weights = net(*inputs, average_attn_weights=False, **masks)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in net.parameters()), *([weights] if need_weights else [])])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert results[1][0].stride() == results[0][0].stride()  # a dropout behind draws in this order
    assert converted.state_dict().keys() == plain.state_dict().keys()


def test_unbatched_and_averaged_as_the_plain_one():
    plain, converted = pair()
    x = torch.randn(5, 32)
    for expected, result in zip(plain(x, x, x), converted(x, x, x), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_an_excluded_attention_keeps_its_projection_too():
    net = nn.TransformerEncoderLayer(32, 4, 64)
    dsq.convert(net, dsq.DSQConfig(exclude="self_attn$", stash="linears"))
    assert list(dsq.converted(net)) == ["linear1", "linear2"]
    assert type(net.self_attn.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear


def test_the_fused_path_is_off_and_comes_back():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    before = [type(m) for m in net.modules()], net.layers[0].activation_relu_or_gelu, net.use_nested_tensor
    x, padded = torch.randn(2, 5, 32), {"src_key_padding_mask": torch.arange(5) > torch.tensor([[2], [4]])}
    dsq.convert(net.eval(), dsq.DSQConfig(levels="[2,2,2,16]", stash="all"))
    assert dsq.stash.controller.applied(net)
    with torch.no_grad():  # where the fused path would take the weights
        without_gradient = net(x, **padded)
    torch.testing.assert_close(without_gradient, net(x, **padded).detach())
    assert dsq.unconvert(net) is net
    assert ([type(m) for m in net.modules()], net.layers[0].activation_relu_or_gelu, net.use_nested_tensor) == before
    assert not dsq.stash.controller.applied(net)
    torch.testing.assert_close(dsq.convert(net, FLOAT)(x), dsq.unconvert(net)(x))
