"""Layers of transformers: GPT-2's Conv1D is the linear layer of the transposed weight; attention's products."""

import copy
import warnings

import pytest
import torch

import dsq

pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D

from analysis.conversion_shares import MODELS, shares
from tests.dsq.gradients import same, step


@pytest.mark.parametrize("levels", ["[4,4,4,16]", "[4,4,4,8]", "[2,2,2,8]"])
def test_conv1d_is_a_linear_layer_of_the_transposed_weight(levels):
    config = dsq.DSQConfig(levels=levels, stash="linears")
    net, linear = Conv1D(48, 32), torch.nn.Linear(32, 48)
    linear.weight.data, linear.bias.data = net.weight.data.t().contiguous(), net.bias.data
    dsq.convert(net, config), dsq.convert(linear, config)
    assert repr(net).startswith(f"Conv1D(nf=48, nx=32, precision={levels}")
    x = torch.randn(2, 16, 32, requires_grad=True)
    *gradients, dw, db = step(net, x)
    assert same([*gradients, dw.t(), db], step(linear, x))


def test_at_8_bits_the_weight_s_gradient_is_not_copied():
    net, addresses = dsq.convert(Conv1D(48, 32), dsq.DSQConfig(levels="[4,4,4,8]", stash="linears")), []
    net.weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    net(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert addresses == [net.weight.grad.data_ptr()]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_at_full_width_it_is_sdpa(name):
    model, inputs = MODELS[name]()
    plain = copy.deepcopy(model.eval())
    dsq.convert(model, dsq.DSQConfig(levels="[32,32,32,32]", attention=True, stash="linears"))
    assert model.config._attn_implementation == "dsq"
    if "input_ids" in inputs:
        inputs["attention_mask"] = (torch.arange(64) < torch.tensor([[64], [40]])).long()
    expected, actual = (net(**inputs).logits for net in (plain, model))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    dsq.unconvert(model)
    assert model.config._attn_implementation == "sdpa"


WHOLE = ["bert", "gpt2", "opt", "t5", "nn.Transformer", "nanoGPT", "vit", "fairseq"]
ROUTED = ["mixtral", "qwen2-moe"]  #: their routers, of a column for each expert, are left


@pytest.mark.parametrize("name", WHOLE + ROUTED)
def test_every_product_is_quantized_or_hardly_one_is_left(name):
    if name == "fairseq":
        pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = shares(name, attention=True, tied=True)
    assert row["uncalled"] == 0
    assert row["skipped parameters"] == (2 * 4 * 128 if name in ROUTED else 0)
    assert row["forward"] > 0.995
    assert row["backward"] > 0.995
