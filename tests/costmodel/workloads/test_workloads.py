"""Workloads by name, from config.json and from files."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from dsq.costmodel.model.methods import FP32
from dsq.costmodel.model.traffic import transfers
from dsq.costmodel.workloads import config_json, named, workload_file
from dsq.costmodel.workloads.named import load_workload
from dsq.costmodel.workloads.shapes import Head, Stack, Transformer
from dsq.costmodel.workloads.transformer import build
from tests.costmodel.workloads.models import dump

MODELS = tomllib.loads((Path(named.__file__).parent / "models.toml").read_text())
BERT = MODELS["bert-base"]["config"]


@pytest.mark.parametrize("name", MODELS)
def test_a_named_model_has_the_published_parameters_and_its_source(name):
    assert load_workload(name).parameters == MODELS[name]["parameters"]
    assert MODELS[name]["source"]


@pytest.mark.parametrize(
    ("name", "absent", "parameters"),
    [
        ("bert-base", ["architectures"], 109_482_240),  # of transformers' model, without a head
        ("gpt2", ["activation_function", "attn_pdrop", "resid_pdrop"], 124_439_808),
    ],
)
def test_a_config_json_may_leave_out_what_has_a_default(name, absent, parameters, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in MODELS[name]["config"].items() if k not in absent}))
    assert load_workload(str(path)).parameters == parameters


@pytest.mark.parametrize(
    "given, name",
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("llama3.2_1b", "llama-3.2-1b"),
        ("mixtral", "mixtral-8x7b"),
        ("transformer_wmt", "transformer_wmt_en_de"),
        ("bert-base-uncased", "bert-base"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("openai-community/gpt2", "gpt2"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("iwslt", "transformer_iwslt_de_en"),
    ],
)
def test_names_are_completed(given, name):
    assert load_workload(given).name == name


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3", "gpt"])
def test_a_name_that_is_none_is_an_error_that_has_it_as_typed(name):
    with pytest.raises(ValueError, match=f"unknown workload '{name}'"):
        load_workload(name)


def test_attention_is_fused_as_the_model_runs_it():
    def on_chip(name, fused=None, cpu=False):
        return {gemm.on_chip for gemm in load_workload(name, fused, cpu).gemms if not gemm.weight}

    assert on_chip("gpt2") == on_chip("transformer_iwslt_de_en", fused=True) == {"x", "y"}
    assert on_chip("gpt2", fused=False) == on_chip("transformer_iwslt_de_en") == {""}
    assert on_chip("t5-small") == on_chip("vit-base", cpu=True) == {"x", "y"}
    assert on_chip("gpt2", cpu=True) == on_chip("t5-small", cpu=True) == {""}  # no kernel of a CPU takes dropout


def test_gpt2s_conv1d_is_converted_and_its_tied_output_projection_is_not():
    plain = [gemm.name for gemm in load_workload("gpt2").gemms if gemm.weight and not gemm.quantized]
    assert plain == ["output_projection"]


@pytest.mark.parametrize(
    ("model", "layers", "adapted"),
    [
        ("gpt2", "c_attn", {"qkv_proj"}),
        ("gpt2", "c_attn,c_proj", {"qkv_proj", "out_proj", "fc2"}),
        ("llama-2-7b", "(q_proj|o_proj)$", {"q_proj", "out_proj"}),
        ("llama-2-7b", "down_proj, lm_head", {"down_proj", "output_projection"}),
        ("bert-base", "query,value", {"q_proj", "v_proj"}),
        ("pythia-160m", "query_key_value", {"qkv_proj"}),
    ],
)
def test_layers_are_known_by_the_names_that_transformers_has_for_them(model, layers, adapted):
    adapters = load_workload(model).adapting(4, layers).gemms
    assert {
        op.name.removesuffix(".lora_A").rpartition(".")[2] for op in adapters if op.name.endswith(".lora_A")
    } == adapted


def test_gemma_2_sees_all_keys_in_each_second_layer():
    config = MODELS["gemma-2-2b"]["config"] | {"sliding_window": 3}
    model = replace(config_json.transformer_of(config, "config.json"), target_length=5)
    scores = [op.macs // (8 * 256) for op in build(model).fusing_attention().gemms if op.name.endswith("scores")]
    assert scores[:4] == [1 + 2 + 3 + 3 + 3, 15] * 2
    caps = [
        [op.name for op in made.operations if op.kind == "cap" and op.cls == "other"]
        for made in (build(model), build(model).chunking_loss())
    ]
    assert caps == [["logits.cap"], []]
    uneven = config | {"layer_types": ["sliding_attention"] * 25 + ["full_attention"], "num_hidden_layers": 27}
    assert config_json.transformer_of(uneven, "config.json").decoder.full_every == 26
    with pytest.raises(ValueError, match="field layer_types: each n-th layer"):
        config_json.transformer_of(config | {"layer_types": ["full_attention", "sliding_attention"]}, "config.json")


def test_rotary_positions_turn_queries_and_keys():
    """A fused kernel spares the copies of heads, and no rotation."""
    data = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    data |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10}
    workload = build(replace(config_json.transformer_of(data, "here"), target_length=6))

    def passes(workload, kind):
        return {op.name.rpartition(".")[2]: (op.rows, op.width) for op in workload.operations if op.kind == kind}

    assert passes(workload, "rotary") == {"q_rotary": (6 * 4, 8), "k_rotary": (6 * 2, 8)}
    assert passes(workload, "transposed") == {"k_heads": (6 * 4, 8)}  # for every query's head
    assert list(passes(workload, "heads")) == ["q_heads", "v_heads", "context_heads"]
    fused = workload.fusing_attention()
    assert passes(fused, "rotary") == passes(workload, "rotary")
    assert not passes(fused, "heads") | passes(fused, "transposed")


def test_causal_and_sliding_attention_of_a_fused_kernel():
    """A query sees itself and the keys before it, in a window the last few of them; a plain kernel computes all."""
    config = MODELS["mistral-7b"]["config"] | {"sliding_window": 3}
    model = replace(config_json.transformer_of(config, "config.json"), target_length=5)
    plain, fused = build(model), build(model).fusing_attention()
    pairs = 1 + 2 + 3 + 3 + 3

    def scores(workload):
        return next(gemm.macs for gemm in workload.gemms if gemm.name.endswith("scores"))

    assert scores(plain) == 32 * 5 * 5 * 128
    assert scores(fused) == 32 * pairs * 128


def test_a_mask_is_made_once_and_read_by_every_layer():
    """The mask of 2 sequences of 8 tokens is in fp32; a fused kernel needs none."""
    stack = Stack("decoder", 3, 16, 2, 32, causal=True, window=4)
    workload = build(Transformer("masked", Head("none"), decoder=stack, sequences=2, target_length=8))
    mask = 2 * 8 * 8 * 4
    moved = transfers(workload, FP32)
    assert sum(t.bytes for t in moved if t.group.names[0].startswith("decoder.mask")) == mask
    assert sum(t.bytes for t in moved if t.tensor == "mask") == 3 * mask
    fused = transfers(workload.fusing_attention(), FP32)
    assert not [t for t in fused if "mask" in t.tensor + t.group.names[0]]


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "vit-base", "mixtral", "transformer_iwslt_de_en"])
def test_a_workload_survives_its_file(name):
    workload = replace(load_workload(name), patches=0)  # a file counts tokens
    assert workload_file.parse(json.loads(json.dumps(dump(workload))), "file") == workload


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "berd"}, "nearest is 'bert'"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"hidden_size": "768"}, "field hidden_size must be a whole number from 1, got '768'"),
        ({"num_attention_heads": 7}, r"d \(768\) must be a multiple of encoder.heads \(7\)"),
        ({"num_hidden_layers": 10**9}, "encoder.layers must be a whole number in 1..4096"),
        ({"hidden_dropout_prob": "0.1"}, "field hidden_dropout_prob must be a number in .*, got '0.1'"),
        ({"architectures": ["BertForQuestionAnswering"]}, "are described, not 'BertForQuestionAnswering'"),
        ({"quantization_config": 8}, "field quantization_config must be a table, not 8"),
        ({"add_cross_attention": True}, "field add_cross_attention: a decoder without an encoder is described"),
    ],
)
def test_bad_config_names_the_field(change, message):
    config = {k: v for k, v in (BERT | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        config_json.transformer_of(config, "config.json")


@pytest.mark.parametrize("field", ["_name_or_path", "tie_word_embeddings", "type_vocab_size", "architectures"])
def test_a_null_in_a_config_is_an_absent_field(field):
    absent = {name: value for name, value in BERT.items() if name != field}
    null, without = (config_json.transformer_of(config, "config.json") for config in (BERT | {field: None}, absent))
    assert null == without


FILE = {"costmodel": 1, "name": "a", "tokens": 1}


def operation(**fields):
    """A file of one operation with these fields; None: without the field."""
    whole = {"op": "gemm", "name": "a", "M": 1, "K": 2, "N": 3} | fields
    return FILE | {"operations": [{name: value for name, value in whole.items() if value is not None}]}


PASS = {"op": "pointwise", "M": None, "K": None, "N": None, "rows": 1, "width": 1}


@pytest.mark.parametrize(
    "data, message",
    [
        (operation() | {"costmodel": 2}, "field costmodel must be 1"),
        (operation() | {"operations": {}}, "field operations must be a list with at least one gemm"),
        (operation(**PASS, kind="norm"), "field operations must be a list with at least one gemm"),
        (operation(**PASS, kind="sum"), "kind must be one of"),
        (operation(op="conv"), r"operations\[0\].op must be one of gemm, pointwise"),
        (operation(N=None), r"operations\[0\].N is missing"),
        (operation(N=True), r"operations\[0\].N must be a whole number"),
        (operation(Z=1), r"operations\[0\].Z is not"),
        (operation(on_chip="z"), r"operations\[0\].on_chip must be one of '', 'x', 'y', not 'z'"),
        (operation() | {"tokens": 0}, "field tokens must be a whole number in 1"),
        (operation(saves=[["x", "a", 8]]), r"saves must be a list of \[role, tensor, values, bits\]"),
    ],
)
def test_bad_workload_file_names_the_field(data, message):
    assert workload_file.parse(operation(), "ok.json").macs == 18
    with pytest.raises(ValueError, match=message):
        workload_file.parse(data, "bad.json")
