"""The shapes that each family's model classes build from its config.json, one function a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from costmodel.huggingface_config import Config
from costmodel.transformer import Head, Stack, Transformer

DEFAULT_LENGTH = 512


def _name(config: Config) -> str:
    return config.text("_name_or_path") or config.text("model_type")


def _encoder_head(config: Config, vocab: int, masked_bias: bool = True) -> Head:
    """Heads of BERT's kin: a masked LM, a classifier behind a dense layer, or a bare pooler."""
    if config.architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        tied = config.flag("tie_word_embeddings", True)
        return Head("lm", vocab, bias=masked_bias, tied=tied, dense=True, norm=True)
    if config.architecture.endswith("ForSequenceClassification"):
        return Head("classes", config.classes, bias=True, dense=True)
    return Head("none", dense=True)


def bert(config: Config) -> Transformer:
    d, vocab = config.size("hidden_size"), config.size("vocab_size")
    positions = config.size("max_position_embeddings")
    encoder = Stack(
        "encoder",
        config.size("num_hidden_layers"),
        d,
        config.size("num_attention_heads"),
        config.size("intermediate_size"),
        embedding_norm=True,
        tables=(
            ("word_embeddings", vocab, d),
            ("position_embeddings", positions, d),
            ("token_type_embeddings", config.size("type_vocab_size", default=2), d),
        ),
    )
    return Transformer(
        _name(config),
        _encoder_head(config, vocab),
        encoder=encoder,
        source_length=min(DEFAULT_LENGTH, positions),
        source=config.where,
    )


def distilbert(config: Config) -> Transformer:
    d, vocab = config.size("dim"), config.size("vocab_size")
    positions = config.size("max_position_embeddings")
    encoder = Stack(
        "encoder",
        config.size("n_layers"),
        d,
        config.size("n_heads"),
        config.size("hidden_dim"),
        embedding_norm=True,
        tables=(("word_embeddings", vocab, d), ("position_embeddings", positions, d)),
    )
    bare = not config.architecture.endswith(("ForMaskedLM", "ForSequenceClassification"))
    head = Head("none") if bare else _encoder_head(config, vocab)
    return Transformer(
        _name(config), head, encoder=encoder, source_length=min(DEFAULT_LENGTH, positions), source=config.where
    )


def _decoder_only(config: Config, decoder: Stack, tied: bool, positions: int, head_bias: bool = False) -> Transformer:
    head = Head("lm", config.size("vocab_size"), bias=head_bias, tied=tied)
    if config.architecture.endswith("ForSequenceClassification"):
        head = Head("classes", config.classes)
    elif config.architecture.endswith("Model") and not config.architecture.endswith("LMHeadModel"):
        head = Head("none")
    return Transformer(_name(config), head, decoder=decoder, target_length=min(2048, positions), source=config.where)


def gpt2(config: Config) -> Transformer:
    d, positions = config.size("n_embd"), config.size("n_positions", "n_ctx")
    decoder = Stack(
        "decoder",
        config.size("n_layer"),
        d,
        config.size("n_head"),
        config.size("n_inner", default=4 * d),
        final_norm=True,
        tables=(("wte", config.size("vocab_size"), d), ("wpe", positions, d)),
    )
    return _decoder_only(config, decoder, config.flag("tie_word_embeddings", True), positions)


def opt(config: Config) -> Transformer:
    d, positions = config.size("hidden_size"), config.size("max_position_embeddings")
    if config.size("word_embed_proj_dim", default=d) != d:
        raise ValueError(
            f"config {config.where}: field word_embed_proj_dim other than hidden_size ({d}) is not supported"
        )
    bias = config.flag("enable_bias", True)
    decoder = Stack(
        "decoder",
        config.size("num_hidden_layers"),
        d,
        config.size("num_attention_heads"),
        config.size("ffn_dim"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        final_norm=config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False),
        tables=(("embed_tokens", config.size("vocab_size"), d), ("embed_positions", positions + 2, d)),
    )
    return _decoder_only(config, decoder, config.flag("tie_word_embeddings", True), positions)


def gpt_neox(config: Config) -> Transformer:
    d, positions = config.size("hidden_size"), config.size("max_position_embeddings")
    bias = config.flag("attention_bias", True)
    decoder = Stack(
        "decoder",
        config.size("num_hidden_layers"),
        d,
        config.size("num_attention_heads"),
        config.size("intermediate_size"),
        qkv_bias=bias,
        out_bias=bias,
        final_norm=True,
        tables=(("embed_in", config.size("vocab_size"), d),),
    )
    return _decoder_only(config, decoder, config.flag("tie_word_embeddings", False), positions)


def phi(config: Config) -> Transformer:
    d, positions = config.size("hidden_size"), config.size("max_position_embeddings")
    decoder = Stack(
        "decoder",
        config.size("num_hidden_layers"),
        d,
        config.size("num_attention_heads"),
        config.size("intermediate_size"),
        kv_heads=config.size("num_key_value_heads", default=config.size("num_attention_heads")),
        norms=1,  # attention and MLP run side by side behind one norm
        final_norm=True,
        tables=(("embed_tokens", config.size("vocab_size"), d),),
    )
    return _decoder_only(config, decoder, config.flag("tie_word_embeddings", False), positions, head_bias=True)


def llama_like(
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    norms: int = 2,
    kv_default: int = 0,
) -> Callable[[Config], Transformer]:
    """Llama's kin: RMS norms, gated MLP, grouped-query attention, rotary positions."""

    def read(config: Config) -> Transformer:
        d, heads = config.size("hidden_size"), config.size("num_attention_heads")
        biased = config.flag("attention_bias", False)
        decoder = Stack(
            "decoder",
            config.size("num_hidden_layers"),
            d,
            heads,
            config.size("intermediate_size"),
            kv_heads=config.size("num_key_value_heads", default=kv_default or heads),
            head_dim=config.size("head_dim", default=d // heads),
            gated=True,
            qkv_bias=qkv_bias or biased,
            out_bias=out_bias or biased,
            mlp_bias=config.flag("mlp_bias", False),
            rms=True,
            norms=norms,
            qk_norm=qk_norm,
            final_norm=True,
            tables=(("embed_tokens", config.size("vocab_size"), d),),
        )
        return _decoder_only(
            config,
            decoder,
            config.flag("tie_word_embeddings", tied),
            config.size("max_position_embeddings", default=2048),
        )

    return read


def t5(config: Config) -> Transformer:
    d, vocab = config.size("d_model"), config.size("vocab_size")
    layers, heads = config.size("num_layers"), config.size("num_heads")
    gated = config.text("feed_forward_proj", "relu").startswith("gated")
    encoder = Stack(
        "encoder",
        layers,
        d,
        heads,
        config.size("d_ff"),
        head_dim=config.size("d_kv"),
        gated=gated,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rms=True,
        final_norm=True,
        tables=(("embed_tokens", vocab, d),),
        extra_parameters=config.size("relative_attention_num_buckets", default=32) * heads,
    )
    decoder = replace(
        encoder,
        name="decoder",
        layers=config.size("num_decoder_layers", default=layers),
        cross=True,
        tables=(("embed_tokens (shared)", 0, d),),
    )
    tied = config.flag("tie_word_embeddings", True)
    return _encoder_decoder(config, encoder, decoder, Head("lm", vocab, tied=tied), DEFAULT_LENGTH)


def bart(
    positions_offset: int, final_norm: bool = False, embedding_norm: bool = True
) -> Callable[[Config], Transformer]:
    """BART's kin: learned positions in both stacks, biases everywhere, one shared table of words."""

    def read(config: Config) -> Transformer:
        d, vocab, positions = config.size("d_model"), config.size("vocab_size"), config.size("max_position_embeddings")

        def stack(name: str, words: int, cross: bool) -> Stack:
            return Stack(
                name,
                config.size(f"{name}_layers"),
                d,
                config.size(f"{name}_attention_heads"),
                config.size(f"{name}_ffn_dim"),
                cross=cross,
                final_norm=final_norm,
                embedding_norm=embedding_norm,
                tables=(("embed_tokens", words, d), ("embed_positions", positions + positions_offset, d)),
            )

        tied = config.flag("tie_word_embeddings", True)
        head = Head("lm", vocab, tied=tied)
        return _encoder_decoder(config, stack("encoder", vocab, False), stack("decoder", 0, True), head, positions)

    return read


def _encoder_decoder(config: Config, encoder: Stack, decoder: Stack, head: Head, positions: int) -> Transformer:
    if config.architecture.endswith("Model"):
        head = Head("none")
    length = min(DEFAULT_LENGTH, positions)
    return Transformer(
        _name(config),
        head,
        encoder=encoder,
        decoder=decoder,
        source_length=length,
        target_length=length,
        source=config.where,
    )
