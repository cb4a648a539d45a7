"""Workloads by name (models.toml, and fairseq's), from a Hugging Face config.json, or from a workload file."""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.model.operations import Workload
from costmodel.names import completed
from costmodel.workloads import config_json, workload_file
from costmodel.workloads.shapes import Head, Stack, Transformer
from costmodel.workloads.transformer import build
from dsq.command import read_json

_FILE = Path(__file__).with_name("models.toml")
_IWSLT = "its IWSLT14 recipe's 10k joint BPE (8848 and 6632 types) with the decoder's embeddings tied"
_WMT = "base, its WMT recipe's 32k joint BPE (32768 types), all embeddings shared"
#: fairseq's architectures: heads, width of the MLP, types of the source and the target (0: one table), and their source
_FAIRSEQ = {
    "transformer_iwslt_de_en": (4, 1024, 8848, 6632, _IWSLT),
    "transformer_wmt_en_de": (8, 2048, 32768, 0, _WMT),
}


@cache
def _models() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of all workloads that have one."""
    return [*_FAIRSEQ, *_models()]


def load_workload(
    name: str,
    sequences: int | None = None,
    source_length: int | None = None,
    target_length: int | None = None,
    fused: bool | None = None,
) -> Workload:
    """A workload by name (completed), from a Hugging Face config.json, or from a workload file (dsq.workload.trace).

    fused: attention runs in a fused kernel, where one takes it; None: as the model runs it.
    Raises ValueError.
    """
    sizes = {"sequences": sequences, "source_length": source_length, "target_length": target_length}
    given = {field: size for field, size in sizes.items() if size is not None}
    loaded = _load(name)
    if isinstance(loaded, Workload):
        if given:
            raise ValueError(f"workload file {name} states its own sizes: {', '.join(given)} cannot be changed")
        return loaded.fusing_attention() if fused else loaded
    model = _sized(loaded, given)
    workload = build(model)
    return workload.fusing_attention() if (model.fuses if fused is None else fused) else workload


def load_shapes(name: str, **sizes: int) -> Transformer:
    """A model by name or from a Hugging Face config.json. Raises ValueError, for a workload file too."""
    loaded = _load(name)
    if isinstance(loaded, Workload):
        raise ValueError(f"workload file {name} states one device's operations, which cannot be cut for more")
    return _sized(loaded, sizes)


def _load(name: str) -> Transformer | Workload:
    if not name.endswith(".json"):
        if not Path(name, "config.json").is_file():
            otherwise = ", or a .json file (a config.json or a workload file), or a folder with a config.json"
            found = completed("workload", name, names(), otherwise)
            return fairseq(found) if found in _FAIRSEQ else _named(found)
        name = str(Path(name, "config.json"))
    data = read_json(Path(name))
    if workload_file.is_workload(data):
        return workload_file.parse(data, name)
    return config_json.transformer_of(data, name)


def _named(name: str) -> Transformer:
    stated = _models()[name]
    model = config_json.transformer_of(stated["config"], stated["source"], name)
    return replace(model, **stated.get("step", {}))


def fairseq(name: str) -> Transformer:
    """Six layers a side, 512 wide, the decoder's embeddings tied."""
    heads, ffn, source_types, target_types, source = _FAIRSEQ[name]
    words = ("embed_tokens", target_types) if target_types else ("embed_tokens (shared)", 0)
    trained: dict[str, Any] = {"activation": "relu", "dropout": True, "post_norm": True}
    return Transformer(
        name,
        Head("lm", target_types or source_types, tied=True),
        encoder=Stack("encoder", 6, 512, heads, ffn, tables=(("embed_tokens", source_types),), **trained),
        decoder=Stack("decoder", 6, 512, heads, ffn, cross=True, causal=True, tables=(words,), **trained),
        sequences=128,
        source_length=32,
        target_length=32,
        fuses=False,
        source=f"fairseq arch {name}, {source}; paper table 3: 4096 tokens a batch, here 128 sentences of 32",
    )


def _sized(model: Transformer, given: Any) -> Transformer:
    for length, stack in (("source_length", model.encoder), ("target_length", model.decoder)):
        side = "encoder" if length == "source_length" else "decoder"
        if length in given and not stack:
            raise ValueError(f"{length} does nothing for {model.name}, which has no {side}: leave it out")
        if length in given and stack and stack.patches:
            raise ValueError(f"{length} is what the patches of {model.name} are: leave it out")
    return replace(model, **given)
