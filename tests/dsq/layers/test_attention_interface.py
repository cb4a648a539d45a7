"""Attention in models of transformers: at full width what "sdpa" gives; quantised, all products but none left."""

import copy
import warnings

import pytest
import torch

import dsq

pytest.importorskip("transformers")
from analysis.coverage import MODELS, shares


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5", "ViT"])
def test_at_full_width_it_is_sdpa(name):
    model, inputs = MODELS[name]()
    plain = copy.deepcopy(model.eval())
    dsq.convert(model, dsq.DSQConfig(levels="[32,32,32,32]", attention=True))
    assert model.config._attn_implementation == "dsq"
    if "input_ids" in inputs:
        inputs["attention_mask"] = (torch.arange(64) < torch.tensor([[64], [40]])).long()
    expected, found = (net(**inputs).logits for net in (plain, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    dsq.unconvert(model)
    assert model.config._attn_implementation == "sdpa"


WHOLE = ["BERT", "GPT-2", "OPT", "T5", "nn.Transformer", "nanoGPT", "written attention"]
ROUTED = ["Mixtral", "Qwen2-MoE", "ViT"]  #: products of a few columns are left


@pytest.mark.parametrize("name", WHOLE + ROUTED)
def test_every_product_is_quantised_or_hardly_one_is_left(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = shares(name, attention=True, tied=True)
    assert row["uncalled"] == 0
    assert row["parameters left"] == 0 or name in ROUTED
    assert row["forward"] > 0.995
    assert row["backward"] > 0.995
