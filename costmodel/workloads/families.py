"""Hugging Face's families as data: how each names its shapes, and what it has that others do not.

An entry's values are constants, or functions of the configuration: `size("hidden_size")` reads a field.
"""

from dataclasses import replace
from typing import Any

from costmodel.names import suggestion
from costmodel.workloads.config_json import ConfigJson, flag, rotary, size, windows
from costmodel.workloads.family import (
    DEFAULT_LENGTH,
    LONGEST,
    Family,
    Fields,
    decoder_only,
    encoder_decoder,
    encoder_only,
    image_encoder,
)
from costmodel.workloads.family_parts import all_experts, dense_layers, experts, falcon, latent, patches, speech
from costmodel.workloads.shapes import Transformer


def _opt_width(config: ConfigJson) -> int:
    d = config.size("hidden_size")
    if config.size("word_embed_proj_dim", default=d) != d:
        raise ValueError(f"config {config.where}: field word_embed_proj_dim must be hidden_size ({d})")
    return d


def _opt_norm(config: ConfigJson) -> bool:
    return config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)


#: fields of most families
VOCABULARY, POSITIONS = size("vocab_size"), size("max_position_embeddings")
USUAL: Fields = {
    "layers": size("num_hidden_layers"),
    "d": size("hidden_size"),
    "heads": size("num_attention_heads"),
    "ffn": size("intermediate_size"),
}
_SHORT: Fields = {"layers": size("n_layer"), "heads": size("n_head")}
_UNBIASED: Fields = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False)


def _four_wide(*names: str) -> Fields:
    """An MLP four times as wide as the model, whose width has one of these names."""
    return {"d": size(*names), "ffn": size("n_inner", default=lambda config: 4 * config.size(*names))}


_KV_HEADS: Fields = {"kv_heads": size("num_key_value_heads", default=size("num_attention_heads"))}
#: RMS norms, gated MLP, grouped-query attention, rotary positions
LLAMA: Fields = {
    **USUAL,
    **_KV_HEADS,
    "head_dim": size("head_dim", default=lambda c: c.size("hidden_size") // c.size("num_attention_heads")),
    "gated": True,
    "qkv_bias": flag("attention_bias", False),
    "out_bias": flag("attention_bias", False),
    "mlp_bias": flag("mlp_bias", False),
    "rms": True,
    "rotary": rotary(),
    "final_norm": True,
}
_WORDS: Fields = {"embed_tokens": VOCABULARY}


def _llama_like(tied: bool = False, **more: Any) -> Family:
    return Family(decoder_only, LLAMA | more, _WORDS, tied=tied)


_BERT_TABLES: Fields = {
    "word_embeddings": VOCABULARY,
    "position_embeddings": POSITIONS,
    "token_type_embeddings": size("type_vocab_size", default=2),
}
_BERT = Family(encoder_only, USUAL | {"embedding_norm": True, "post_norm": True}, _BERT_TABLES)
_NARROW: Fields = {"embedding_width": size("embedding_size", default=128)}


def _sided(side: str) -> Fields:
    return {
        "layers": size(f"{side}_layers"),
        "d": size("d_model"),
        "heads": size(f"{side}_attention_heads"),
        "ffn": size(f"{side}_ffn_dim"),
    }


def _bart_like(extra_positions: int | None, frozen: bool = False, **more: Any) -> Family:
    """Both stacks have positions, biases everywhere and one table of words; None: positions that are no parameters."""
    positions: Fields = {}
    if extra_positions is not None:
        positions = {"embed_positions": lambda config: config.size("max_position_embeddings") + extra_positions}
    more |= {"frozen": ("embed_positions",)} if frozen else {}
    shared = {"embed_tokens (shared)": 0} | positions
    return Family(
        encoder_decoder, _sided("encoder") | more, _WORDS | positions, _sided("decoder") | {"cross": True}, shared
    )


_T5: Fields = {
    "layers": size("num_layers"),
    "d": size("d_model"),
    "heads": size("num_heads"),
    "ffn": size("d_ff"),
    "head_dim": size("d_kv"),
    "rms": True,
    "final_norm": True,
    **_UNBIASED,
    "position_bias": size("relative_attention_num_buckets", default=32),
    "casts_late": True,
    "gated": lambda config: config.text("feed_forward_proj", "relu").startswith("gated"),
    "activation": lambda config: "relu" if config.text("feed_forward_proj", "relu") == "relu" else "activation",
}
_T5_FAMILY = Family(
    encoder_decoder,
    _T5,
    _WORDS,
    {"layers": size("num_decoder_layers", "num_layers"), "cross": True},
    {"embed_tokens (shared)": 0},
    positions=lambda _: DEFAULT_LENGTH,
)
_QWEN_EXPERTS = experts(
    "num_experts num_local_experts", "num_experts_per_tok", "moe_intermediate_size", dense_layers=dense_layers
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    "electra": replace(
        _BERT, stack=_BERT.stack | _NARROW, head={"pooler": False, "width": size("embedding_size", default=128)}
    ),
    "albert": replace(
        _BERT,
        stack=_BERT.stack | _NARROW | {"shared_layers": size("num_hidden_groups", default=1)},
        head={"width": size("embedding_size", default=128)},
    ),
    "distilbert": Family(
        encoder_only,
        {"layers": size("n_layers"), "d": size("dim"), "heads": size("n_heads"), "ffn": size("hidden_dim")}
        | {"embedding_norm": True, "post_norm": True},
        {"word_embeddings": VOCABULARY, "position_embeddings": POSITIONS},
        head={"pooler": False},
    ),
    "modernbert": Family(
        encoder_only,
        USUAL
        | {"gated": True, "embedding_norm": True, "fused_qkv": True, "final_norm": True, "first_norms": 1}
        | dict.fromkeys(("qkv_bias", "out_bias"), flag("attention_bias", False))
        | {"mlp_bias": flag("mlp_bias", False), "norm_bias": flag("norm_bias", False)}
        | {"rotary": rotary(), "windows": windows("local_attention", every=3, first=True, halved=True)},
        {"tok_embeddings": VOCABULARY},
        head={
            "pooler": False,
            "dense_bias": flag("classifier_bias", False),
            "norm_bias": flag("norm_bias", False),
            "bias": flag("decoder_bias", True),
        },
    ),
    "gpt2": Family(
        decoder_only,
        _SHORT | _four_wide("n_embd") | {"fused_qkv": True, "final_norm": True, "transposed": True},
        {"wte": VOCABULARY, "wpe": size("n_positions", "n_ctx")},
        positions=size("n_positions", "n_ctx"),
    ),
    "gptj": Family(  # attention without biases and MLP side by side behind one norm
        decoder_only,
        _SHORT
        | _four_wide("n_embd")
        | {"qkv_bias": False, "out_bias": False, "norms": 1, "final_norm": True}
        | {"rotary": lambda c: c.size("rotary_dim", default=64) * c.size("n_head") / c.size("n_embd")},
        {"wte": VOCABULARY},
        tied=False,
        head={"bias": True},
        positions=size("n_positions", default=LONGEST),
    ),
    "gpt_neo": Family(
        decoder_only,
        {"layers": size("num_layers"), "heads": size("num_heads"), "d": size("hidden_size")}
        | {"ffn": size("intermediate_size", default=lambda config: 4 * config.size("hidden_size"))}
        | {"qkv_bias": False, "final_norm": True, "windows": windows("window_size", every=2, first=True)},
        {"wte": VOCABULARY, "wpe": POSITIONS},
    ),
    "gpt_neox": Family(
        decoder_only,
        USUAL
        | dict.fromkeys(("qkv_bias", "out_bias"), flag("attention_bias", True))
        | {"fused_qkv": True, "final_norm": True, "rotary": rotary(0.25)},
        {"embed_in": VOCABULARY},
        tied=False,
    ),
    "opt": Family(
        decoder_only,
        USUAL
        | {"ffn": size("ffn_dim"), "d": _opt_width}
        | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), flag("enable_bias", True))
        | {"final_norm": _opt_norm},
        {"embed_tokens": VOCABULARY, "embed_positions": lambda c: c.size("max_position_embeddings") + 2},
    ),
    "bloom": Family(
        decoder_only,
        _SHORT | _four_wide("hidden_size", "n_embed") | {"embedding_norm": True, "fused_qkv": True, "final_norm": True},
        {"word_embeddings": VOCABULARY},
    ),
    "falcon": Family(
        decoder_only,
        USUAL
        | {"ffn": size("ffn_hidden_size", default=lambda config: 4 * config.size("hidden_size"))}
        | {name: (lambda c, name=name: falcon(c)[name]) for name in ("kv_heads", "norms")}
        | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), flag("bias", False))
        | {"fused_qkv": True, "final_norm": True, "rotary": lambda c: not c.flag("alibi", False)}
        | {"converted": False},  # its layers are a subclass of nn.Linear
        {"word_embeddings": VOCABULARY},
    ),
    "phi": Family(  # attention and MLP side by side behind one norm
        decoder_only,
        USUAL | _KV_HEADS | {"norms": 1, "final_norm": True, "rotary": rotary(0.5)},
        _WORDS,
        tied=False,
        head={"bias": True},
    ),
    "starcoder2": Family(
        decoder_only,
        USUAL
        | {"kv_heads": size("num_key_value_heads", default=2), "final_norm": True, "windows": windows("sliding_window")}
        | {"rotary": rotary()}
        | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), flag("use_bias", True)),
        _WORDS,
    ),
    "llama": _llama_like(),
    "phi3": _llama_like(fused_qkv=True, windows=windows("sliding_window")),
    "mistral": _llama_like(kv_heads=size("num_key_value_heads", default=8), windows=windows("sliding_window")),
    "mixtral": _llama_like(
        kv_heads=size("num_key_value_heads", default=8),
        windows=windows("sliding_window"),
        experts=experts("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    ),
    "qwen2": _llama_like(qkv_bias=True, windows=windows("sliding_window", switch="use_sliding_window")),
    "qwen3": _llama_like(qk_norm="head", windows=windows("sliding_window", switch="use_sliding_window")),
    "qwen3_moe": _llama_like(
        qk_norm="head", windows=windows("sliding_window", switch="use_sliding_window"), experts=_QWEN_EXPERTS
    ),
    "olmo2": _llama_like(qk_norm="all", post_norm=True),
    "gemma": _llama_like(tied=True),
    "gemma2": _llama_like(tied=True, norms=4, windows=windows("sliding_window", every=2)),
    "gemma3_text": _llama_like(tied=True, norms=4, qk_norm="head", windows=windows("sliding_window", every=6)),
    "deepseek_v3": _llama_like(
        latent=latent,
        kv_heads=0,
        experts=experts(
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            shared=lambda c: c.size("moe_intermediate_size") * c.size("n_shared_experts", default=1),
            dense_layers=lambda c: frozenset(range(int(c.data.get("first_k_dense_replace", 3)))),
        ),
    ),
    "gpt_oss": _llama_like(
        qkv_bias=flag("attention_bias", True),
        out_bias=flag("attention_bias", True),
        windows=windows("sliding_window", every=2),
        layer_parameters=size("num_attention_heads"),  # attention's sinks
        experts=experts("num_local_experts", "num_experts_per_tok", "intermediate_size", bias=True, router_bias=True),
    ),
    "llama4_text": _llama_like(ffn=size("intermediate_size_mlp"), experts=all_experts),
    **dict.fromkeys(("t5", "mt5"), _T5_FAMILY),
    "bart": _bart_like(2, embedding_norm=True, post_norm=True),
    "mbart": _bart_like(2, embedding_norm=True, final_norm=True),
    "marian": _bart_like(0, frozen=True, post_norm=True),
    "pegasus": _bart_like(0, frozen=True, final_norm=True),
    "m2m_100": _bart_like(None, final_norm=True),
    "whisper": Family(
        encoder_decoder,
        _sided("encoder")
        | {
            "key_bias": False,
            "context_copied": True,
            "final_norm": True,
            "convolutions": speech,
            "frozen": ("embed_positions",),
        },
        {"embed_positions": size("max_source_positions")},
        _sided("decoder") | {"cross": True, "convolutions": (), "frozen": ()},
        {"embed_tokens": VOCABULARY, "embed_positions": size("max_target_positions")},
        positions=size("max_target_positions"),
    ),
    "vit": Family(
        image_encoder,
        USUAL
        | {"convolutions": patches(True), "final_norm": True, "qkv_bias": flag("qkv_bias", True)}
        | {"extra_parameters": lambda config: config.size("hidden_size")},  # the class token
        {"position_embeddings": lambda config: patches(True)(config)[0].positions + 1},
    ),
    "clip_vision_model": Family(
        image_encoder,
        USUAL
        | {"convolutions": patches(False), "embedding_norm": True, "final_norm": True}
        | {"extra_parameters": lambda config: config.size("hidden_size")},
        {"position_embeddings": lambda config: patches(False)(config)[0].positions + 1},
        head={"pooler": False},
    ),
    "clip_text_model": Family(
        decoder_only,
        USUAL | {"final_norm": True},
        {"token_embedding": VOCABULARY, "position_embedding": POSITIONS},
    ),
}
#: model_type -> what to do about a family that is not described
REFUSED = {
    "deberta-v2": "its disentangled attention is not described: trace the model with dsq.workload.trace",
    "mamba": "state-space models are not described by their configuration: trace the model with dsq.workload.trace",
    "clip": "it holds two models: give its text_config (clip_text_model) or vision_config (clip_vision_model)",
    "gemma3": "it holds a vision model and a language model: give its text_config (gemma3_text)",
    "llama4": "it holds a vision model and a language model: give its text_config (llama4_text)",
}


def transformer_of(data: Any, where: str) -> Transformer:
    """The transformer a config.json describes. Raises ValueError that names the file and field."""
    if not isinstance(data, dict):
        raise ValueError(f"config {where} must be a JSON object")
    config = ConfigJson({name: value for name, value in data.items() if value is not None}, where)
    name = config.text("model_type")
    if not name:
        raise ValueError(f"config {where}: field model_type is missing")
    if name in REFUSED:
        raise ValueError(f"config {where}: model_type {name!r} is not supported: {REFUSED[name]}")
    if name not in FAMILIES:
        known = f"{suggestion(name, FAMILIES)}supported are {', '.join(FAMILIES)}"
        raise ValueError(f"config {where}: model_type {name!r} is not supported; {known}")
    return FAMILIES[name].kind(config, FAMILIES[name])
