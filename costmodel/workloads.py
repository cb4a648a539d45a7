"""Workloads by name, each from stated shapes; or from a Hugging Face config.json; or from a workload file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.names import nearest
from costmodel.operations import Workload
from costmodel.transformer import Head, Stack, Transformer, build


def transformer_iwslt_de_en() -> Transformer:
    return Transformer(
        name="transformer_iwslt_de_en",
        encoder=Stack("encoder", 6, 512, heads=4, ffn=1024, tables=(("embed_tokens", 8848, 512),)),
        decoder=Stack("decoder", 6, 512, heads=4, ffn=1024, cross=True, tables=(("embed_tokens", 6632, 512),)),
        head=Head("lm", 6632, tied=True),
        sequences=128,
        source_length=32,
        target_length=32,
        source="fairseq arch transformer_iwslt_de_en, its IWSLT14 recipe's 10k joint BPE (8848 and 6632 types) with "
        "the decoder's embeddings tied; paper table 3: 4096 tokens a batch, here 128 sentences of 32",
    )


def transformer_wmt_en_de() -> Transformer:
    return Transformer(
        name="transformer_wmt_en_de",
        encoder=Stack("encoder", 6, 512, heads=8, ffn=2048, tables=(("embed_tokens", 32768, 512),)),
        decoder=Stack("decoder", 6, 512, heads=8, ffn=2048, cross=True, tables=(("embed_tokens (shared)", 0, 512),)),
        head=Head("lm", 32768, tied=True),
        sequences=128,
        source_length=32,
        target_length=32,
        source="fairseq arch transformer_wmt_en_de (base), its WMT recipe's 32k joint BPE (32768 types), all "
        "embeddings shared; paper table 3: 4096 tokens a batch, here 128 sentences of 32",
    )


def _roberta_base(task: str, classes: int) -> Transformer:
    tables = (("word_embeddings", 50265, 768), ("position_embeddings", 514, 768), ("token_type_embeddings", 1, 768))
    return Transformer(
        name=f"roberta_base_{task}",
        encoder=Stack("encoder", 12, 768, heads=12, ffn=3072, embedding_norm=True, tables=tables),
        head=Head("classes", classes, bias=True, dense=True),
        sequences=32,
        source_length=128,
        source=f"roberta-base's config.json with a {classes}-class head; paper table 3: 32 sequences and at most "
        "4400 tokens a batch, here 32 of 128",
    )


def opt_1_3b() -> Transformer:
    return Transformer(
        name="opt_1.3b",
        decoder=Stack(
            "decoder",
            24,
            2048,
            heads=32,
            ffn=8192,
            final_norm=True,
            tables=(("embed_tokens", 50272, 2048), ("embed_positions", 2050, 2048)),
        ),
        head=Head("lm", 50272, tied=True),
        sequences=1,
        target_length=2048,
        source="facebook/opt-1.3b's config.json; one sequence of its full 2048 positions",
    )


REGISTRY: dict[str, Callable[[], Transformer]] = {
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
    sizes = {"sequences": sequences, "source_length": source_length, "target_length": target_length}
    given: dict[str, Any] = {field: value for field, value in sizes.items() if value is not None}
    if name in REGISTRY:
        workload = _build(REGISTRY[name](), given)
    elif name.endswith(".json"):
        workload = _from_file(name, given)
    else:
        raise ValueError(
            f"unknown workload {name!r}: nearest is {nearest(name, REGISTRY)!r}; workloads are "
            f"{', '.join(REGISTRY)}, or a .json file (a Hugging Face config.json or a workload file)"
        )
    workload.check_size()
    return workload


def _build(model: Transformer, given: dict[str, Any]) -> Workload:
    for length, stack in (("source_length", "encoder"), ("target_length", "decoder")):
        if length in given and not getattr(model, stack):
            raise ValueError(f"{length} does nothing for {model.name}, which has no {stack}: leave it out")
    return build(replace(model, **given))


def _from_file(name: str, given: dict[str, Any]) -> Workload:
    from costmodel import huggingface, workload_file

    data = workload_file.read_json(Path(name))
    if not workload_file.is_workload(data):
        return _build(huggingface.parse(data, name), given)
    if given:
        raise ValueError(f"workload file {name} states its own sizes: {', '.join(given)} cannot be changed")
    return workload_file.parse(data, name)
