"""Traced models with convolutions and scans: every product, against PyTorch's own counter."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dsq
from dsq.costmodel.workloads import workload_file
from dsq.workload.of_transformers import trace_config

transformers = pytest.importorskip("transformers")

SIDES = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"d_model": 32, "encoder_ffn_dim": 80, "decoder_ffn_dim": 48, "pad_token_id": 1, "vocab_size": 60},
}
IDS = {"input_ids": torch.ones(2, 12, dtype=torch.long)}


def of_transformers(family, name, inputs, **fields):
    config = transformers.AutoConfig.for_model(family, **fields)
    config._attn_implementation = "eager"
    return getattr(transformers, name)(config).eval(), inputs


def convolutions():
    layers = [
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 6, 2, groups=2),
    ]
    return nn.Sequential(*layers), {"input": torch.randn(3, 4, 16, 16)}


CASES = {
    "convolutions": convolutions,
    "whisper": lambda: of_transformers(
        "whisper",
        "WhisperForConditionalGeneration",
        {"input_features": torch.zeros(2, 8, 40), "decoder_input_ids": IDS["input_ids"]},
        **SIDES,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=64,
    ),
    "mamba": lambda: of_transformers(
        "mamba", "MambaForCausalLM", IDS, hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=60
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", CASES)
def test_forward_products(case, device):
    with torch.device(device):
        model, inputs = CASES[case]()
    inputs = {name: x.to(device) for name, x in inputs.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    data = dsq.workload.trace(model, **inputs)
    workload = workload_file.parse(json.loads(json.dumps(data)), "traced")
    assert 2 * sum(gemm.macs for gemm in workload.gemms) == counter.get_total_flops()
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_whisper_is_traced_from_its_config(tmp_path):
    """Its decoder's mask alone looks at data, and the meta device has none."""
    path = tmp_path / "config.json"
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 8}
    tokens = {"eos_token_id": 2, "bos_token_id": 3, "decoder_start_token_id": 3}
    path.write_text(json.dumps(config | SIDES | tokens | {"max_source_positions": 20, "max_target_positions": 64}))
    traced = workload_file.parse(trace_config(str(path), 2, 12), "traced")
    model, _ = CASES["whisper"]()
    assert traced.parameters == sum(parameter.numel() for parameter in model.parameters())
