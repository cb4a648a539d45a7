"""Small models of Hugging Face and fairseq for the check of predicted memory: each with a batch and its workload."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from analysis.models import from_transformers
from analysis.small_transformers import workload_of
from costmodel.model.operations import Workload
from costmodel.workloads.named import fairseq
from costmodel.workloads.transformer import build

SEQUENCES, LENGTH, WORDS, WIDTH = 16, 128, 1000, 128
USUAL = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
#: name -> class of transformers, and fields of its configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "activation_function": "gelu"},
    ),
    "gpt2-124m": ("GPT2LMHeadModel", {"activation_function": "gelu", "vocab_size": 50257}),
    "llama": ("LlamaForCausalLM", USUAL | {"intermediate_size": 352}),
    "bert": ("BertForMaskedLM", USUAL),
    "opt": ("OPTForCausalLM", USUAL | {"ffn_dim": 512, "word_embed_proj_dim": WIDTH, "activation_function": "relu"}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": WIDTH, "num_layers": 4, "num_heads": 4, "d_kv": 32, "d_ff": 4 * WIDTH}
        | {"decoder_start_token_id": 0},
    ),
    "vit": ("ViTForImageClassification", USUAL | {"image_size": 96, "patch_size": 8}),
    "mixtral": (
        "MixtralForCausalLM",
        USUAL | {"intermediate_size": 352, "num_local_experts": 4, "num_key_value_heads": 4},
    ),
}
#: the one of full size, and the sequences of its batch
LARGE, LARGE_SEQUENCES = "gpt2-124m", 2
FAIRSEQ = "fairseq"
NAMES = (*MODELS, FAIRSEQ)


@dataclass(frozen=True)
class CheckedModel:
    """A model, the loss of its batch, and what the cost model makes of it."""

    model: nn.Module
    loss: Callable[[], Tensor]
    workload: Workload


def checked_model(name: str) -> CheckedModel:
    torch.manual_seed(0)
    return _fairseq() if name == FAIRSEQ else _transformers(name)


def _transformers(name: str) -> CheckedModel:
    head, fields = MODELS[name]
    sequences = LARGE_SEQUENCES if name == LARGE else SEQUENCES
    model = from_transformers(head, **({"vocab_size": WORDS} | fields))
    ids = torch.randint(1, WORDS, (sequences, LENGTH))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    sizes: dict[str, int] = {"target_length": LENGTH}
    if name == "vit":
        inputs, sizes = {"pixel_values": torch.randn(SEQUENCES, 3, 96, 96), "labels": torch.zeros(SEQUENCES).long()}, {}
    elif name == "t5":
        sizes["source_length"] = LENGTH
    elif name == "bert":
        sizes = {"source_length": LENGTH}
    workload = workload_of(model, sequences, **sizes)

    def loss() -> Tensor:
        wanted = next(model.parameters()).dtype
        for key, x in inputs.items():
            inputs[key] = x.to(wanted) if x.is_floating_point() else x
        return model(**inputs).loss

    return CheckedModel(model, loss, workload)


def _fairseq() -> CheckedModel:
    import_module("fairseq_plugin.shims")  # before fairseq, which does not load without
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture
    from fairseq.modules import MultiheadAttention

    words = Dictionary()
    for word in range(WORDS - len(words)):
        words.add_symbol(f"w{word}")
    arguments = Namespace(
        **{f"{side}_layers": 4 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_embed_dim": 4 * WIDTH for side in ("encoder", "decoder")},
        **{f"{side}_embed_dim": WIDTH for side in ("encoder", "decoder")},
        **{"share_decoder_input_output_embed": True, "dropout": 0.0},
    )
    base_architecture(arguments)
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model: nn.Module = TransformerModel.build_model(arguments, task).train()
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            module.skip_embed_dim_check = True  # as fairseq_plugin does: attention calls its Linears
    ids = torch.randint(4, WORDS, (SEQUENCES, LENGTH))
    lengths = torch.full((SEQUENCES,), LENGTH)

    def loss() -> Tensor:
        logits = model(ids, lengths, ids)[0]
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    shape = fairseq("transformer_iwslt_de_en")
    assert shape.encoder is not None
    assert shape.decoder is not None
    tables = (("embed_tokens", WORDS),)
    sizes: dict[str, Any] = {"layers": 4, "d": WIDTH, "heads": 4, "ffn": 4 * WIDTH, "tables": tables, "dropout": False}
    workload = build(
        replace(
            shape,
            head=replace(shape.head, outputs=WORDS, upcasts=True),
            encoder=replace(shape.encoder, **sizes),
            decoder=replace(shape.decoder, **sizes),
            sequences=SEQUENCES,
            source_length=LENGTH,
            target_length=LENGTH,
        )
    )
    return CheckedModel(model, loss, workload)
