"""A Hugging Face config.json as a Transformer. A family is added by adding its function to FAMILIES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costmodel.huggingface_config import Config
from costmodel.huggingface_families import (
    bart,
    bert,
    distilbert,
    gpt2,
    gpt_neox,
    llama_like,
    opt,
    phi,
    t5,
)
from costmodel.names import nearest
from costmodel.transformer import Transformer

FAMILIES: dict[str, Callable[[Config], Transformer]] = {
    "bert": bert,
    "roberta": bert,
    "xlm-roberta": bert,
    "camembert": bert,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "opt": opt,
    "gpt_neox": gpt_neox,
    "phi": phi,
    "llama": llama_like(),
    "mistral": llama_like(kv_default=8),
    "qwen2": llama_like(qkv_bias=True),
    "qwen3": llama_like(qk_norm=True),
    "gemma": llama_like(tied=True),
    "gemma2": llama_like(tied=True, norms=4),
    "phi3": llama_like(),
    "t5": t5,
    "mt5": t5,
    "bart": bart(positions_offset=2),
    "mbart": bart(positions_offset=2, final_norm=True),
}


def parse(data: Any, where: str) -> Transformer:
    """The transformer a config.json describes. Raises ValueError that names the file and field."""
    if not isinstance(data, dict):
        raise ValueError(f"config {where} must be a JSON object")
    config = Config({name: value for name, value in data.items() if value is not None}, where)
    family = config.text("model_type")
    if not family:
        raise ValueError(f"config {where}: field model_type is missing")
    if family not in FAMILIES:
        raise ValueError(
            f"config {where}: model_type {family!r} is not supported; nearest is {nearest(family, FAMILIES)!r}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[family](config)
