"""Parts of a model that a Hugging Face config.json states in several fields: convolutions, experts, attention."""

from typing import Any

from costmodel.workloads.config_json import ConfigJson
from costmodel.workloads.family import Fields, Reader, read_fields
from costmodel.workloads.shapes import Convolution, Latent, MixtureOfExperts


def patches(bias: bool) -> Reader:
    def read(config: ConfigJson) -> tuple[Convolution, ...]:
        image, patch = config.size("image_size", default=224), config.size("patch_size", default=16)
        area, channels = patch * patch, config.size("num_channels", default=3)
        return (Convolution("patches", channels, config.size("hidden_size"), area, (image // patch) ** 2, area, bias),)

    return read


def speech(config: ConfigJson) -> tuple[Convolution, ...]:
    """Whisper's two convolutions, the second of which halves the length."""
    d, mels, length = config.size("d_model"), config.size("num_mel_bins"), config.size("max_source_positions")
    return (
        Convolution("conv1", mels, d, 3, 2 * length, 1, activation=True),
        Convolution("conv2", d, d, 3, length, 2, activation=True),
    )


def experts(count: str, chosen: str, width: str, **more: Any) -> Reader:
    """A mixture of experts with its numbers in these fields, each with its other names after a blank."""

    def read(config: ConfigJson) -> MixtureOfExperts:
        number, ours, wide = (config.size(*field.split()) for field in (count, chosen, width))
        return MixtureOfExperts(number, ours, wide, **read_fields(config, more))

    return read


def all_experts(config: ConfigJson) -> MixtureOfExperts:
    """Llama 4: transformers multiplies every token with every expert, by zero where it was not chosen."""
    count, width, layers = config.size("num_local_experts"), config.size("intermediate_size"), config.data
    step = config.size("interleave_moe_layer_step", default=1)
    sparse = layers.get("moe_layers") or range(step - 1, config.size("num_hidden_layers"), step)
    dense = frozenset(range(config.size("num_hidden_layers"))) - frozenset(sparse)
    return MixtureOfExperts(count, count, width, shared=width, dense_layers=dense, converted=False)


def dense_layers(config: ConfigJson) -> frozenset[int]:
    """Qwen's layers without experts."""
    step, only = config.size("decoder_sparse_step", default=1), config.data.get("mlp_only_layers") or ()
    return frozenset(i for i in range(config.size("num_hidden_layers")) if i in only or (i + 1) % step)


def latent(config: ConfigJson) -> Latent:
    rank = 0 if "q_lora_rank" not in config.data else config.size("q_lora_rank")
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(rank, *(config.size(field) for field in widths))


def falcon(config: ConfigJson) -> Fields:
    """Its three layouts: 7b shares one head of keys, 40b some, 1b-rw none."""
    heads, new = config.size("num_attention_heads"), config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True)
    norms = config.size("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    one = config.flag("multi_query", True) and not new
    return {"kv_heads": 1 if one else config.size("num_kv_heads", default=heads), "norms": norms}
