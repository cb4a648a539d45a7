"""Small models of transformers by name, and fairseq's transformer, of random weights."""

from argparse import Namespace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

#: name -> class, fields beside the sizes of ``_sizes``
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}),
    "t5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", {"image_size": 64, "patch_size": 8, "num_labels": 10}),
}


def _sizes(name: str, width: int, blocks: int, heads: int) -> dict[str, Any]:
    """How a configuration names its sizes; the feed-forward layer is four times as wide."""
    if name == "gpt2":
        return {"n_embd": width, "n_layer": blocks, "n_head": heads}
    if name == "t5":
        return {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_layers": blocks, "num_heads": heads}
    if name == "distilbert":
        return {"dim": width, "hidden_dim": 4 * width, "n_layers": blocks, "n_heads": heads}
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads}
    if name == "opt":
        return sizes | {"ffn_dim": 4 * width, "word_embed_proj_dim": width}
    if name == "qwen2-moe":
        sizes |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    return sizes | {"intermediate_size": 4 * width}


def transformer(
    name: str,
    width: int,
    blocks: int,
    heads: int,
    words: int = 1000,
    batch: tuple[int, int] = (8, 128),
    attention: str = "sdpa",
    dropout: bool = False,
    **fields: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """A model of TRANSFORMERS, and the inputs of a batch of (sequences, tokens), labels among them; as many images as
    have that many patches. Random weights, training mode, no cache of keys and values, which is no part of training.
    ``dropout``: as the configuration has it; else none. ``fields``: of its configuration, before those of the table.
    """
    import transformers

    head, usual = TRANSFORMERS[name]
    fields = _sizes(name, width, blocks, heads) | usual | fields
    if name == "vit":
        side, tokens = fields["image_size"], (fields["image_size"] // fields["patch_size"]) ** 2
        images = torch.randn(batch[0] * batch[1] // tokens, 3, side, side)
        inputs = {"pixel_values": images, "labels": torch.zeros(len(images)).long()}
    else:
        ids, fields["vocab_size"] = torch.randint(1, words, batch), words
        inputs = {"input_ids": ids, "labels": ids}
    kind = getattr(transformers, head)
    config = kind.config_class(attn_implementation=attention, use_cache=False, **fields)
    for field in vars(config):
        if "drop" in field and not dropout:
            setattr(config, field, 0.0)
    return kind(config).train(), inputs


def fairseq_transformer(
    width: int, layers: int, heads: int, words: int, batch: tuple[int, int]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """fairseq's transformer, its output projection tied to the decoder's table, without dropout, and a batch."""
    import_module("fairseq_plugin.shims")  # before fairseq, which does not load without
    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    dictionary = Dictionary()
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index))
    sizes = {"layers": layers, "embed_dim": width, "ffn_embed_dim": 4 * width, "attention_heads": heads}
    sizes_of_sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    args = Namespace(share_decoder_input_output_embed=True, dropout=0.0, **sizes_of_sides)
    base_architecture(args)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model: nn.Module = TransformerModel.build_model(args, task).train()
    ids = torch.randint(4, words, batch)
    lengths = torch.full((batch[0],), batch[1])
    return model, {"src_tokens": ids, "src_lengths": lengths, "prev_output_tokens": ids}
