"""Workloads by name, each from stated shapes; or from a Hugging Face config.json; or from a workload file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.model.operations import Workload
from costmodel.names import suggestion
from costmodel.workloads.shapes import Head, Stack, Transformer
from costmodel.workloads.transformer import build


def _fairseq(name: str, heads: int, ffn: int, source_types: int, target_types: int, source: str) -> Transformer:
    """Six layers a side, 512 wide, the decoder's embeddings tied; 0 target types: one table for both sides."""
    words = ("embed_tokens", target_types, 512) if target_types else ("embed_tokens (shared)", 0, 512)
    trained: dict[str, Any] = {"activation": "relu", "dropout": True, "post_norm": True}
    return Transformer(
        name,
        Head("lm", target_types or source_types, tied=True),
        encoder=Stack("encoder", 6, 512, heads, ffn, tables=(("embed_tokens", source_types, 512),), **trained),
        decoder=Stack("decoder", 6, 512, heads, ffn, cross=True, causal=True, tables=(words,), **trained),
        sequences=128,
        source_length=32,
        target_length=32,
        source=f"fairseq arch {name}{source}; paper table 3: 4096 tokens a batch, here 128 sentences of 32",
    )


def transformer_iwslt_de_en() -> Transformer:
    recipe = ", its IWSLT14 recipe's 10k joint BPE (8848 and 6632 types) with the decoder's embeddings tied"
    return _fairseq("transformer_iwslt_de_en", 4, 1024, 8848, 6632, recipe)


def transformer_wmt_en_de() -> Transformer:
    recipe = " (base), its WMT recipe's 32k joint BPE (32768 types), all embeddings shared"
    return _fairseq("transformer_wmt_en_de", 8, 2048, 32768, 0, recipe)


def _roberta_base(task: str, classes: int) -> Transformer:
    tables = (("word_embeddings", 50265, 768), ("position_embeddings", 514, 768), ("token_type_embeddings", 1, 768))
    dropouts: dict[str, Any] = {"dropout": True, "attention_dropout": True, "post_norm": True}
    return Transformer(
        f"roberta_base_{task}",
        Head("classes", classes, bias=True, dense=True),
        encoder=Stack("encoder", 12, 768, heads=12, ffn=3072, embedding_norm=True, tables=tables, **dropouts),
        sequences=32,
        source_length=128,
        source=f"roberta-base's config.json with a {classes}-class head; paper table 3: 32 sequences and at most "
        "4400 tokens a batch, here 32 of 128",
    )


def opt_1_3b() -> Transformer:
    tables = (("embed_tokens", 50272, 2048), ("embed_positions", 2050, 2048))
    trained: dict[str, Any] = {"activation": "relu", "dropout": True, "causal": True}
    return Transformer(
        "opt_1.3b",
        Head("lm", 50272, tied=True),
        decoder=Stack("decoder", 24, 2048, heads=32, ffn=8192, final_norm=True, tables=tables, **trained),
        target_length=2048,
        source="facebook/opt-1.3b's config.json; one sequence of its full 2048 positions",
    )


WORKLOADS: dict[str, Callable[[], Transformer]] = {
    "transformer_iwslt_de_en": transformer_iwslt_de_en,
    "transformer_wmt_en_de": transformer_wmt_en_de,
    "roberta_base_mnli": lambda: _roberta_base("mnli", 3),
    "roberta_base_qnli": lambda: _roberta_base("qnli", 2),
    "opt_1.3b": opt_1_3b,
}


def load_workload(
    name: str, sequences: int | None = None, source_length: int | None = None, target_length: int | None = None
) -> Workload:
    """A workload by name, from a Hugging Face config.json, or from a workload file (dsq.workload.trace). Raises
    ValueError."""
    loaded = _load(name, sequences, source_length, target_length)
    workload = loaded if isinstance(loaded, Workload) else build(loaded)
    workload.check_size()
    return workload


def load_shapes(
    name: str, sequences: int | None = None, source_length: int | None = None, target_length: int | None = None
) -> Transformer:
    """A model by name or from a Hugging Face config.json. Raises ValueError, for a workload file too."""
    loaded = _load(name, sequences, source_length, target_length)
    if isinstance(loaded, Workload):
        raise ValueError(f"workload file {name} states one device's operations, which cannot be cut for more")
    return loaded


def _load(name: str, *sizes: int | None) -> Transformer | Workload:
    fields = ("sequences", "source_length", "target_length")
    given = {field: size for field, size in zip(fields, sizes, strict=True) if size is not None}
    if name in WORKLOADS:
        return _sized(WORKLOADS[name](), given)
    if not name.endswith(".json"):
        known = f"{', '.join(WORKLOADS)}, or a .json file (a Hugging Face config.json or a workload file)"
        raise ValueError(f"unknown workload {name!r}: {suggestion(name, WORKLOADS)}workloads are {known}")
    from costmodel.workloads import families, workload_file

    data = workload_file.read_json(Path(name))
    if not workload_file.is_workload(data):
        return _sized(families.transformer_of(data, name), given)
    if given:
        raise ValueError(f"workload file {name} states its own sizes: {', '.join(given)} cannot be changed")
    return workload_file.parse(data, name)


def _sized(model: Transformer, given: Any) -> Transformer:
    for length, stack in (("source_length", "encoder"), ("target_length", "decoder")):
        if length in given and not getattr(model, stack):
            raise ValueError(f"{length} does nothing for {model.name}, which has no {stack}: leave it out")
        if length in given and getattr(model, stack).convolutions:
            raise ValueError(f"{length} is what the convolutions of {model.name} put out: leave it out")
    return replace(model, **given)
