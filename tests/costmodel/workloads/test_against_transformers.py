"""Config families against the models that transformers builds, small, on the meta device: parameters and forward
products, exactly."""

import json
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dsq
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.traffic import total_stash_bytes
from dsq.costmodel.workloads import workload_file
from dsq.costmodel.workloads.config_json import FAMILIES, transformer_of
from dsq.costmodel.workloads.named import load_workload
from dsq.workload.of_transformers import trace_config
from tests.costmodel.workloads.models import converting_tied

transformers = pytest.importorskip("transformers")

SEQUENCES, LENGTH = 3, 16
BFP_4 = Setup(dsq.BFP(32), dsq.Precision(4, 4, 4, 16))
USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
POSITIONS = {"max_position_embeddings": 64}
GROUPED = USUAL | POSITIONS | {"num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
T5 = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 80, "d_kv": 6, "pad_token_id": 0}
PICTURE = {"image_size": 32, "patch_size": 8}
#: model_type -> (class, fields); a further spelling of a family stands behind a blank
MODELS = {
    "bert": ("BertForMaskedLM", USUAL | POSITIONS),
    "bert classifier": ("BertForSequenceClassification", USUAL | POSITIONS),
    "roberta": ("RobertaForMaskedLM", USUAL | POSITIONS),
    "xlm-roberta": ("XLMRobertaForMaskedLM", USUAL | POSITIONS),
    "camembert": ("CamembertForMaskedLM", USUAL | POSITIONS),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 80} | POSITIONS),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", USUAL | POSITIONS),
    "opt": ("OPTForCausalLM", USUAL | POSITIONS | {"ffn_dim": 80, "word_embed_proj_dim": 32}),
    "phi": ("PhiForCausalLM", GROUPED),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama biased": ("LlamaForCausalLM", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 6}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", GROUPED | MIXTURE | {"num_experts": 4}),
    "gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 6}),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", USUAL | PICTURE),
    "vit bare": ("ViTModel", USUAL | PICTURE),
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")
MIXTURES = ("mixtral", "qwen3_moe")


def config_of(case):
    family, (name, fields) = case.split()[0], MODELS[case]
    config = transformers.AutoConfig.for_model(family, vocab_size=101, **fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # what runs without data
    return family, name, config


def inputs_of(family, config):
    if family == "vit":
        return {"pixel_values": torch.zeros(SEQUENCES, 3, 32, 32)}
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": _ids(LENGTH - 3), "decoder_input_ids": _ids()}
    return {"input_ids": _ids()}


def _ids(length=LENGTH):
    return torch.zeros(SEQUENCES, length, dtype=torch.long)


def lengths_of(family, config):
    if family == "vit":
        return {}
    if getattr(config, "is_encoder_decoder", False):
        return {"source_length": LENGTH - 3, "target_length": LENGTH}
    return {"source_length" if family in ENCODERS else "target_length": LENGTH}


@pytest.mark.parametrize("case", MODELS)
def test_parameters_and_forward_products(case, tmp_path):
    family, name, config = config_of(case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    workload = load_workload(str(path), fused=False, sequences=SEQUENCES, **lengths_of(family, config))
    with torch.device("meta"):
        model = getattr(transformers, name)(config).eval()
        assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert workload.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**inputs_of(family, config))
    assert 2 * sum(gemm.macs for gemm in workload.gemms) == counter.get_total_flops()


@pytest.mark.parametrize("case", MODELS)
def test_a_trace_of_the_converted_model_has_the_named_products(case, tmp_path):
    """Those of weights with what is quantised, layers that read alike added up (some read once for two matrices), and
    the bytes that the model stashes; of experts, whose last boxes are not full, no fewer."""
    family, name, config = config_of(case)
    if family in MIXTURES:
        config._experts_implementation = "grouped_mm"  # what trains
    config.use_cache = False
    made = getattr(transformers, name)(config).eval()
    model = dsq.convert(made, dsq.DSQConfig(levels="[4,4,4,16]", format="bfp", tied=True))
    named, traced = tmp_path / "config.json", tmp_path / "traced.json"
    named.write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    traced.write_text(json.dumps(dsq.workload.trace(model, **inputs_of(family, config))))
    expected, found = (
        converting_tied(load_workload(str(named), fused=False, sequences=SEQUENCES, **lengths_of(family, config))),
        load_workload(str(traced)),
    )
    assert outputs_by_kind(found) == outputs_by_kind(expected)
    assert found.parameters == expected.parameters
    assert sum(gemm.macs for gemm in found.gemms) == sum(gemm.macs for gemm in expected.gemms)
    held = dsq.stash.measure(lambda: model(**inputs_of(family, config))).held
    stashed = sum(one.nbytes for one in held if one.op == "_LinearBackward")
    predicted = total_stash_bytes(found, BFP_4)
    assert predicted == total_stash_bytes(expected, BFP_4)
    assert predicted <= stashed if family in MIXTURES else predicted == stashed


def outputs_by_kind(workload):
    """Outputs of the products of weights, by what else there is to say of them."""
    sums = Counter()
    for gemm in workload.gemms:
        if gemm.weight:
            sums[gemm.M, gemm.K, gemm.weights, gemm.quantised, gemm.tied, gemm.x_grad, gemm.w_grad] += gemm.N
    return sums


def test_every_family_is_held_against_its_model():
    assert {case.split()[0] for case in MODELS} == set(FAMILIES)


def test_a_family_that_is_not_described_is_refused():
    with pytest.raises(ValueError, match=r"model_type 'gemma2' is not described; nearest is 'gemma'; .*dsq-cost trace"):
        transformer_of({"model_type": "gemma2"}, "config.json")


def test_traced_experts_are_multiplied_in_groups(tmp_path):
    """A token's weights are no tensors of its own: DeepSeek-V3 was traced so, with 13 times the peak of its run."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 32}
    heads = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | sizes | experts | heads | {"intermediate_size": 128}))
    traced = workload_file.parse(trace_config(str(path), 2, 16), "traced")
    products = {op.name.rpartition(".")[2]: op for op in traced.gemms if ".experts." in op.name}
    assert {name: (op.M, op.K, op.N, op.weights, op.quantised) for name, op in products.items()} == {
        "gate_up_proj": (2 * 16 * 2, 64, 2 * 32, 4, True),
        "down_proj": (2 * 16 * 2, 32, 64, 4, True),
    }
