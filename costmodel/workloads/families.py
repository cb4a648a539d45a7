"""A Hugging Face config.json as a Transformer: the shapes that a family's model classes build, a function a family."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from costmodel.names import suggestion
from costmodel.workloads.config_json import ConfigJson
from costmodel.workloads.transformer import Head, Stack, Transformer

DEFAULT_LENGTH = 512
#: fields of the number of layers, the model's width, the heads and the MLP's width, as most families name them
USUAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


#: fields of a config that switch dropout on; a family without one has none
_DROPOUT = ("hidden_dropout_prob", "dropout", "resid_pdrop", "dropout_rate", "hidden_dropout", "resid_dropout")
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
_ACTIVATION = ("hidden_act", "activation_function", "activation")


def _stack(config: ConfigJson, name: str, sizes: tuple[str, ...], tables: dict[str, int], **options: Any) -> Stack:
    """A stack with sizes from these fields, and embedding tables of these rows, as wide as the model."""
    layers, d, heads, ffn = (config.size(field) for field in sizes)
    rows = tuple((table, count, d) for table, count in tables.items())
    hidden, attention = (
        any(float(config.data.get(field) or 0) > 0 for field in fields) for fields in (_DROPOUT, _ATTENTION_DROPOUT)
    )
    read: dict[str, Any] = {"dropout": hidden, "attention_dropout": attention}
    act = next((config.data[field] for field in _ACTIVATION if field in config.data), "")
    read |= {"activation": "relu" if act == "relu" else "activation", "causal": name == "decoder"}
    options = read | options
    return Stack(name, layers, d, heads, ffn, tables=rows, **options)


def _name(config: ConfigJson) -> str:
    return config.text("_name_or_path") or config.text("model_type")


def _encoder_only(config: ConfigJson, encoder: Stack, pooler: bool = True) -> Transformer:
    """BERT's kin with a masked LM, a classifier behind a dense layer, or a bare pooler (or nothing) on top."""
    head = Head("none", dense=pooler)
    if config.architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        tied = config.flag("tie_word_embeddings", True)
        head = Head("lm", config.size("vocab_size"), bias=True, tied=tied, dense=True, norm=True)
    elif config.architecture.endswith("ForSequenceClassification"):
        head = Head("classes", config.classes, bias=True, dense=True)
    length = min(DEFAULT_LENGTH, config.size("max_position_embeddings"))
    return Transformer(_name(config), head, encoder=encoder, source_length=length, source=config.where)


def bert(config: ConfigJson) -> Transformer:
    tables = {
        "word_embeddings": config.size("vocab_size"),
        "position_embeddings": config.size("max_position_embeddings"),
        "token_type_embeddings": config.size("type_vocab_size", default=2),
    }
    return _encoder_only(config, _stack(config, "encoder", USUAL, tables, embedding_norm=True))


def distilbert(config: ConfigJson) -> Transformer:
    words, positions = config.size("vocab_size"), config.size("max_position_embeddings")
    tables = {"word_embeddings": words, "position_embeddings": positions}
    sizes = ("n_layers", "dim", "n_heads", "hidden_dim")
    return _encoder_only(config, _stack(config, "encoder", sizes, tables, embedding_norm=True), pooler=False)


def _decoder_only(
    config: ConfigJson, decoder: Stack, tied: bool, positions: int, head_bias: bool = False
) -> Transformer:
    tied = config.flag("tie_word_embeddings", tied)
    head = Head("lm", config.size("vocab_size"), bias=head_bias, tied=tied)
    if config.architecture.endswith("ForSequenceClassification"):
        head = Head("classes", config.classes)
    elif config.architecture.endswith("Model") and not config.architecture.endswith("LMHeadModel"):
        head = Head("none")
    return Transformer(_name(config), head, decoder=decoder, target_length=min(2048, positions), source=config.where)


def gpt2(config: ConfigJson) -> Transformer:
    positions = config.size("n_positions", "n_ctx")
    tables = {"wte": config.size("vocab_size"), "wpe": positions}
    decoder = _stack(config, "decoder", ("n_layer", "n_embd", "n_head", "n_embd"), tables, final_norm=True)
    decoder = replace(decoder, ffn=config.size("n_inner", default=4 * decoder.d))
    return _decoder_only(config, decoder, True, positions)


def opt(config: ConfigJson) -> Transformer:
    d, positions = config.size("hidden_size"), config.size("max_position_embeddings")
    if config.size("word_embed_proj_dim", default=d) != d:
        raise ValueError(f"config {config.where}: field word_embed_proj_dim must be hidden_size ({d})")
    bias = config.flag("enable_bias", True)
    tables = {"embed_tokens": config.size("vocab_size"), "embed_positions": positions + 2}
    final = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)
    decoder = _stack(config, "decoder", (*USUAL[:3], "ffn_dim"), tables, **biases, final_norm=final)
    return _decoder_only(config, decoder, True, positions)


def gpt_neox(config: ConfigJson) -> Transformer:
    bias, tables = config.flag("attention_bias", True), {"embed_in": config.size("vocab_size")}
    decoder = _stack(config, "decoder", USUAL, tables, qkv_bias=bias, out_bias=bias, final_norm=True)
    return _decoder_only(config, decoder, False, config.size("max_position_embeddings"))


def phi(config: ConfigJson) -> Transformer:
    """Attention and MLP run side by side behind one norm."""
    kv_heads = config.size("num_key_value_heads", "num_attention_heads")
    tables = {"embed_tokens": config.size("vocab_size")}
    decoder = _stack(config, "decoder", USUAL, tables, kv_heads=kv_heads, norms=1, final_norm=True)
    return _decoder_only(config, decoder, False, config.size("max_position_embeddings"), head_bias=True)


def gptj(config: ConfigJson) -> Transformer:
    """Attention without biases and MLP side by side behind one norm."""
    tables, sizes = {"wte": config.size("vocab_size")}, ("n_layer", "n_embd", "n_head", "n_embd")
    decoder = _stack(config, "decoder", sizes, tables, qkv_bias=False, out_bias=False, norms=1, final_norm=True)
    decoder = replace(decoder, ffn=config.size("n_inner", default=4 * decoder.d))
    return _decoder_only(config, decoder, False, config.size("n_positions", default=2048), head_bias=True)


def gpt_neo(config: ConfigJson) -> Transformer:
    """Its local layers count as if they saw all keys."""
    positions = config.size("max_position_embeddings")
    tables, sizes = {"wte": config.size("vocab_size"), "wpe": positions}, ("num_layers", "hidden_size", "num_heads")
    decoder = _stack(config, "decoder", (*sizes, "hidden_size"), tables, qkv_bias=False, final_norm=True)
    decoder = replace(decoder, ffn=config.size("intermediate_size", default=4 * decoder.d))
    return _decoder_only(config, decoder, True, positions)


def bloom(config: ConfigJson) -> Transformer:
    tables, sizes = {"word_embeddings": config.size("vocab_size")}, ("n_layer", "hidden_size", "n_head", "hidden_size")
    decoder = _stack(config, "decoder", sizes, tables, embedding_norm=True, final_norm=True)
    return _decoder_only(config, replace(decoder, ffn=4 * decoder.d), True, 2048)


def starcoder2(config: ConfigJson) -> Transformer:
    bias = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), config.flag("use_bias", True))
    tables, kv_heads = {"embed_tokens": config.size("vocab_size")}, config.size("num_key_value_heads", default=2)
    decoder = _stack(config, "decoder", USUAL, tables, kv_heads=kv_heads, final_norm=True, **bias)
    return _decoder_only(config, decoder, True, config.size("max_position_embeddings", default=4096))


def llama_like(
    qkv_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    norms: int = 2,
    kv_default: int = 0,
    slides: tuple[str, bool] | None = None,
) -> Callable[[ConfigJson], Transformer]:
    """Llama's kin: RMS norms, gated MLP, grouped-query attention, rotary positions.

    slides: the flag that says whether all layers see a sliding window, and its default.
    """

    def read(config: ConfigJson) -> Transformer:
        d, heads = config.size("hidden_size"), config.size("num_attention_heads")
        biased = config.flag("attention_bias", False)
        decoder = _stack(
            config,
            "decoder",
            USUAL,
            {"embed_tokens": config.size("vocab_size")},
            kv_heads=config.size("num_key_value_heads", default=kv_default or heads),
            head_dim=config.size("head_dim", default=d // heads),
            gated=True,
            qkv_bias=qkv_bias or biased,
            out_bias=biased,
            mlp_bias=config.flag("mlp_bias", False),
            rms=True,
            norms=norms,
            qk_norm=qk_norm,
            final_norm=True,
            window=config.size("sliding_window", default=0) if slides and config.flag(*slides) else 0,
        )
        return _decoder_only(config, decoder, tied, config.size("max_position_embeddings", default=2048))

    return read


def _encoder_decoder(config: ConfigJson, encoder: Stack, decoder: Stack, positions: int) -> Transformer:
    head = Head("lm", config.size("vocab_size"), tied=config.flag("tie_word_embeddings", True))
    if config.architecture.endswith("Model"):
        head = Head("none")
    lengths = dict.fromkeys(("source_length", "target_length"), min(DEFAULT_LENGTH, positions))
    return Transformer(_name(config), head, encoder=encoder, decoder=decoder, source=config.where, **lengths)


def t5(config: ConfigJson) -> Transformer:
    encoder = _stack(
        config,
        "encoder",
        ("num_layers", "d_model", "num_heads", "d_ff"),
        {"embed_tokens": config.size("vocab_size")},
        head_dim=config.size("d_kv"),
        gated=config.text("feed_forward_proj", "relu").startswith("gated"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False),
        rms=True,
        final_norm=True,
        extra_parameters=config.size("relative_attention_num_buckets", default=32) * config.size("num_heads"),
    )
    shared = (("embed_tokens (shared)", 0, encoder.d),)
    layers = config.size("num_decoder_layers", "num_layers")
    decoder = replace(encoder, name="decoder", layers=layers, cross=True, tables=shared)
    return _encoder_decoder(config, encoder, decoder, DEFAULT_LENGTH)


def bart(final_norm: bool = False) -> Callable[[ConfigJson], Transformer]:
    """BART's kin: learned positions in both stacks, biases everywhere, one shared table of words."""

    def read(config: ConfigJson) -> Transformer:
        positions = config.size("max_position_embeddings")

        def stack(name: str, words: int, cross: bool) -> Stack:
            sizes = (f"{name}_layers", "d_model", f"{name}_attention_heads", f"{name}_ffn_dim")
            tables = {"embed_tokens": words, "embed_positions": positions + 2}
            return _stack(config, name, sizes, tables, cross=cross, final_norm=final_norm, embedding_norm=True)

        encoder, decoder = stack("encoder", config.size("vocab_size"), False), stack("decoder", 0, True)
        return _encoder_decoder(config, encoder, decoder, positions)

    return read


FAMILIES: dict[str, Callable[[ConfigJson], Transformer]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), bert),
    "distilbert": distilbert,
    "gpt2": gpt2,
    "opt": opt,
    "gpt_neox": gpt_neox,
    "phi": phi,
    "gptj": gptj,
    "gpt_neo": gpt_neo,
    "bloom": bloom,
    "starcoder2": starcoder2,
    "llama": llama_like(),
    "phi3": llama_like(slides=("use_sliding_window", True)),
    "mistral": llama_like(kv_default=8, slides=("use_sliding_window", True)),
    "qwen2": llama_like(qkv_bias=True),
    "qwen3": llama_like(qk_norm=True),
    "gemma": llama_like(tied=True),
    "gemma2": llama_like(tied=True, norms=4),
    **dict.fromkeys(("t5", "mt5"), t5),
    "bart": bart(),
    "mbart": bart(final_norm=True),
}


def transformer_of(data: Any, where: str) -> Transformer:
    """The transformer a config.json describes. Raises ValueError that names the file and field."""
    if not isinstance(data, dict):
        raise ValueError(f"config {where} must be a JSON object")
    config = ConfigJson({name: value for name, value in data.items() if value is not None}, where)
    family = config.text("model_type")
    if not family:
        raise ValueError(f"config {where}: field model_type is missing")
    if family not in FAMILIES:
        known = f"{suggestion(family, FAMILIES)}supported are {', '.join(FAMILIES)}"
        raise ValueError(f"config {where}: model_type {family!r} is not supported; {known}")
    return FAMILIES[family](config)
