"""Traces: the bytes that autograd saves, as dsq-cost predicts them from the workload file and as a forward has them."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.costmodel.cli.main import main
from dsq.costmodel.model.memory import saved_bytes
from dsq.costmodel.model.methods import DSQ, FP32, Setup
from dsq.costmodel.workloads import workload_file
from dsq.costmodel.workloads.named import load_workload
from dsq.precision import Precision
from tests.costmodel.workloads.models import small_gpt2


class WrittenOut(nn.Module):
    """Attention as nanoGPT writes it out: both products and their softmax are calls of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = self.drop((q @ k.mT / 4).softmax(-1))
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Pointwise(nn.Module):
    """Operations that save their input, their result, both factors, a mask, or a tensor of which views are read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        y = self.down(F.silu(gate) * value + gate.exp().relu().sqrt())
        return F.layer_norm(y, (64,)) * torch.sigmoid(y)


def workload_of(model, *inputs):
    return workload_file.parse(json.loads(json.dumps(dsq.workload.trace(model, *inputs))), "traced")


@pytest.mark.parametrize("block", [WrittenOut, Pointwise])
@pytest.mark.parametrize("length", [32, 128])
def test_a_trace_saves_what_the_forward_saves(block, length):
    model, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(2, length, 64)
    workload = workload_of(model, x).on_cpu()
    measured = dsq.stash.measure(lambda: model(x)).nbytes
    assert saved_bytes(workload, FP32) == pytest.approx(measured, rel=0.001)


def test_a_fused_trace_saves_what_fused_attention_saves():
    """Scores, softmax and dropout go; queries, keys, values and the result stay, which the next layer reads."""
    model, x = nn.Sequential(WrittenOut(), WrittenOut()).eval(), torch.randn(2, 128, 64)
    values, lse = 2 * 128 * 64 * 4, 2 * 4 * 128 * 4
    first, second = 4 * values + lse, 5 * values + lse  # the first block reads the batch
    assert saved_bytes(workload_of(model, x).fusing_attention(), FP32) == first + second


def test_a_trace_of_a_converted_model_saves_its_stash():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(128, 64)
    workload = workload_of(model, x)
    setup = Setup(DSQ, Precision(4, 4, 4, 16), container=32)
    dsq.convert(model, dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    assert saved_bytes(workload, setup) == pytest.approx(dsq.stash.measure(lambda: model(x)).nbytes, abs=64)


SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "MambaForCausalLM": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300},
    "GemmaForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128},
    "MixtralForCausalLM": SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_traced_config_saves_what_its_model_saves(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from dsq.workload.of_transformers import trace_config

    cls = getattr(transformers, name)
    config = cls.config_class(**FAMILIES[name], architectures=[name], use_cache=False)
    config._attn_implementation = "eager"
    if name.startswith("Mixtral"):
        config._experts_implementation = "grouped_mm"
    config.save_pretrained(tmp_path)
    workload = workload_file.parse(trace_config(str(tmp_path), 2, 48), "traced")
    model, ids = cls(config).train(), torch.randint(0, 300, (2, 48))
    measured = dsq.stash.measure(lambda: model(input_ids=ids, labels=ids).loss).nbytes
    assert saved_bytes(workload, FP32) == pytest.approx(measured, rel=0.05)


def test_a_model_of_audio_is_traced(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dsq.workload.of_transformers import trace_config

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.Wav2Vec2Config(**sizes, architectures=["Wav2Vec2Model"]).save_pretrained(tmp_path)
    workload = workload_file.parse(trace_config(str(tmp_path), 2, 8), "traced")
    assert {gemm.M for gemm in workload.gemms if gemm.name.endswith("q_proj")} == {2 * 7}  # 8 x 320 samples


def test_a_config_that_names_no_class_is_traced_with_the_head_that_a_plan_gives_it(tmp_path, capfd):
    """And in silence: transformers warns of the ids of tokens, which no trace reads."""
    transformers = pytest.importorskip("transformers")
    from dsq.workload.of_transformers import _auto

    path = small_gpt2(tmp_path, architectures=None)
    assert main(["trace", path, str(tmp_path / "traced.json"), "--tokens", "16"]) == 0
    assert capfd.readouterr().err == ""
    traced = load_workload(str(tmp_path / "traced.json"))
    assert (traced.name, traced.parameters) == ("GPT2LMHeadModel", load_workload(path).parameters)
    heads = {"bert": "ForMaskedLM", "bart": "ForSeq2SeqLM", "vit": "ForImageClassification", "wav2vec2": ""}
    for kind, head in heads.items():
        assert _auto(transformers.AutoConfig.for_model(kind)).__name__ == f"AutoModel{head}"
