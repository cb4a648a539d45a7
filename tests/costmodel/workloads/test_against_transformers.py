"""Config families against the models that transformers builds, small: parameters and forward products."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from costmodel.workloads.families import transformer_of
from costmodel.workloads.named import load_workload

transformers = pytest.importorskip("transformers")

USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
            "max_position_embeddings": 64,
        },
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "starcoder2": ("Starcoder2ForCausalLM", USUAL | {"num_key_value_heads": 2, "max_position_embeddings": 64}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "llama": ("LlamaForCausalLM", USUAL | {"num_key_value_heads": 2}),
}


@pytest.mark.parametrize("family", MODELS)
def test_parameters_and_forward_products(family, tmp_path):
    name, fields = MODELS[family]
    config = transformers.AutoConfig.for_model(family, vocab_size=101, attn_implementation="eager", **fields)
    model = getattr(transformers, name)(config).eval()
    ids = torch.zeros(3, 16, dtype=torch.long)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    workload = load_workload(str(path), 3, target_length=16)
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert 2 * sum(gemm.macs for gemm in workload.gemms) == counter.get_total_flops()


def test_a_family_that_is_not_known_is_refused():
    for family in ("mixtral", "whisper", "mamba", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"model_type '{family}' is not supported"):
            transformer_of({"model_type": family}, "config.json")
