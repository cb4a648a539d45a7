"""Config families against the small models that transformers builds: parameters, products and stash bytes, exactly."""

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dsq
from dsq.costmodel.model.memory import saved_bytes
from dsq.costmodel.model.methods import BF16, Setup
from dsq.costmodel.model.traffic import total_stash_bytes
from dsq.costmodel.workloads import workload_file
from dsq.costmodel.workloads.config_json import FAMILIES, transformer_of
from dsq.costmodel.workloads.named import load_workload
from dsq.costmodel.workloads.transformer import build
from dsq.formats import BFP
from dsq.precision import Precision
from dsq.workload.of_transformers import trace_config
from tests.costmodel.workloads.test_against_models import flops, measured_stash

transformers = pytest.importorskip("transformers")

SEQUENCES, LENGTH = 3, 15  #: which fill no block, so that every rounding up shows
BFP_4 = Setup(BFP(32), Precision(4, 4, 4, 16))
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
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 6, "sliding_window": 8}),
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
    return family, name, config


def running(case):
    """The model, and its batch."""
    family, name, config = config_of(case)
    config.use_cache = False
    if case in MIXTURES:
        config._experts_implementation = "grouped_mm"
    made = getattr(transformers, name)(config).eval()
    if family == "vit":
        return made, {"pixel_values": torch.zeros(SEQUENCES, 3, 32, 32)}
    ids, shorter = (torch.zeros(SEQUENCES, length, dtype=torch.long) for length in (LENGTH, LENGTH - 3))
    return made, {"input_ids": shorter, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}


def named(case, folder, **fields):
    """The workload that its config.json describes, with these fields besides, its attention unfused."""
    family, name, config = config_of(case)
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": [name]} | fields))
    lengths = {"source_length" if family in ENCODERS else "target_length": LENGTH} if family != "vit" else {}
    lengths |= {"source_length": LENGTH - 3} if config.is_encoder_decoder else {}
    return load_workload(str(path), fused=False, sequences=SEQUENCES, **lengths)


@pytest.mark.parametrize(
    ("case", "frozen", "modules"),
    [
        *((case, "", []) for case in ("bert classifier", "qwen3", "mt5")),
        ("mt5", "^encoder|words", ["encoder"]),  # whose one table serves both sides and the output
        ("qwen3", r"words|layers\.0", ["model.embed_tokens", "model.layers.0"]),
        ("qwen3", "words", ["model.embed_tokens"]),
        ("bert classifier", "fc2", [f"bert.encoder.layer.{layer}.output.dense" for layer in range(2)]),
    ],
)
def test_no_gradient_runs_before_the_first_layer_that_trains(case, frozen, modules, tmp_path):
    (model, inputs), workload = running(case), named(case, tmp_path)
    workload = workload.freezing(frozen) if frozen else workload
    for module in modules:
        model.get_submodule(module).requires_grad_(False)
    assert 2 * workload.macs == flops(model, **inputs)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert [op.rows for op in workload.operations if op.kind == "adam"] == [workload.trained] == [trained]


@pytest.mark.parametrize("case", MODELS)
def test_a_trace_of_the_converted_model_has_the_named_products(case, tmp_path):
    """It also has the model's stash bytes; experts stash more, because their last blocks are not full."""
    found, expected = traced(case, tmp_path), named(case, tmp_path).converting_tied()
    assert outputs_by_kind(found) == outputs_by_kind(expected)
    assert found.parameters == expected.parameters
    assert sum(gemm.macs for gemm in found.gemms) == sum(gemm.macs for gemm in expected.gemms)
    model, inputs = running(case)
    stashed = measured_stash(converted(model), **inputs)
    predicted = total_stash_bytes(found, BFP_4)
    assert predicted == total_stash_bytes(expected, BFP_4)
    assert predicted <= stashed if case in MIXTURES else predicted == stashed


def converted(model, **options):
    return dsq.convert(model, dsq.DSQConfig("[4,4,4,16]", format="bfp", tied=True, **{"stash": "linears", **options}))


def traced(case, folder, **options):
    """The workload of the converted model, by way of a file."""
    model, inputs = running(case)
    path = folder / "traced.json"
    path.write_text(json.dumps(dsq.workload.trace(converted(model, **options), **inputs)))
    return load_workload(str(path))


def test_excluded_layers_are_not_quantized(tmp_path):
    workload = traced("qwen3", tmp_path, exclude="lm_head|gate")
    expected = named("qwen3", tmp_path).excluding("output_projection|gate")
    assert outputs_by_kind(workload) == outputs_by_kind(expected)


def test_fusing_attention_of_a_traced_model_is_that_of_its_shapes(tmp_path):
    plain, shapes = traced("bert", tmp_path), named("bert", tmp_path)
    fused = plain.fusing_attention()
    assert fused.macs - plain.macs == shapes.fusing_attention().macs - shapes.macs > 0
    assert [gemm.on_chip for gemm in fused.gemms if not gemm.weight] == ["y", "x"] * 2


def outputs_by_kind(workload):
    """Outputs of the products of weights, summed over products that agree in all else: some read x once for two."""
    sums = Counter()
    for gemm in workload.gemms:
        if gemm.weight:
            sums[gemm.M, gemm.K, gemm.weights, gemm.quantized, gemm.tied, gemm.x_grad, gemm.w_grad] += gemm.N
    return sums


@pytest.mark.parametrize("case", ["bert", "distilbert", "gpt2", "opt", "t5"])
def test_eager_attention_in_16_bits_keeps_softmax_in_fp32_where_the_family_computes_it_so(case, tmp_path):
    model, inputs = running(case)
    model.bfloat16()
    labels = torch.ones(SEQUENCES, LENGTH, dtype=torch.long)
    measured = dsq.stash.measure(lambda: model(**inputs, labels=labels).loss).nbytes
    undropped = {field: 0.0 for field in config_of(case)[2].to_dict() if "drop" in field}
    assert saved_bytes(named(case, tmp_path, **undropped), BF16) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("case", MODELS)
def test_a_config_that_does_not_state_dropout_has_its_familys(case):
    _family, name, config = config_of(case)
    stated = config.to_dict() | {"architectures": [name]}
    silent = {field: value for field, value in stated.items() if "drop" not in field}
    stacks = [(made.encoder, made.decoder) for made in (transformer_of(each, "test") for each in (stated, silent))]
    assert stacks[0] == stacks[1]


def test_every_family_is_held_against_its_model():
    assert {*(case.split()[0] for case in MODELS), "qwen"} == set(FAMILIES)


@pytest.mark.parametrize(
    ("width", "layers", "ffn", "words", "parameters"),
    [(4096, 32, 22016, 151936, 7_721_324_544), (8192, 80, 49152, 152064, 72_287_920_128)],
)
def test_qwen_whose_class_is_on_the_hub(width, layers, ffn, words, parameters):
    """Parameters of Qwen-7B and 72B; autocast's cross_entropy widens the logits."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": ffn, "vocab_size": words}
    shapes = transformer_of({"model_type": "qwen", "num_attention_heads": width // 128} | sizes, "test")
    assert build(shapes).parameters == parameters
    assert build(shapes).operations[-2].kind == "loss of fp32"


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
    assert {name: (op.M, op.K, op.N, op.weights, op.quantized) for name, op in products.items()} == {
        "gate_up_proj": (2 * 16 * 2, 64, 2 * 32, 4, True),
        "down_proj": (2 * 16 * 2, 32, 64, 4, True),
    }


def test_a_config_that_transformers_wrote_is_read_as_transformers_reads_it(tmp_path):
    """Mamba-2's has an infinity, which JSON has not; a field of the wrong type ends in a line."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8}
    transformers.Mamba2Config(**sizes, architectures=["Mamba2ForCausalLM"]).save_pretrained(tmp_path)
    assert trace_config(str(tmp_path), 1, 16)["operations"]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "big"}')
    with pytest.raises(ValueError, match=r"is of no model that transformers builds: .*hidden_size"):
        trace_config(str(tmp_path), 1, 16)


SIDES = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"d_model": 32, "encoder_ffn_dim": 80, "decoder_ffn_dim": 48, "vocab_size": 60, "num_mel_bins": 8},
    **{"max_source_positions": 20, "max_target_positions": 64, "pad_token_id": 1, "eos_token_id": 2},
    **{"bos_token_id": 3, "decoder_start_token_id": 3, "architectures": ["WhisperForConditionalGeneration"]},
}


def test_a_whisper_is_traced_from_its_config(tmp_path):
    """Its decoder's mask alone looks at data, and the meta device has none."""
    config = transformers.WhisperConfig(**SIDES, attn_implementation="eager")
    config.save_pretrained(tmp_path)
    traced = workload_file.parse(trace_config(str(tmp_path / "config.json"), 2, 12), "traced")
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.zeros(2, 8, 40), "decoder_input_ids": torch.ones(2, 12, dtype=torch.long)}
    assert traced.macs == flops(model, **inputs) / 2
    assert traced.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_products_of_convolutions(device):
    layers = (
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 6, 2, groups=2),
    )
    model, x = nn.Sequential(*layers).to(device), torch.randn(3, 4, 16, 16, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    workload = workload_file.parse(dsq.workload.trace(model, x), "traced")
    assert 2 * sum(gemm.macs for gemm in workload.gemms) == counter.get_total_flops()
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
