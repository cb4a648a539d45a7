"""Shares of a transformer against Megatron's formulas (Korthikanti et al., 2022) and the whole model."""

from dataclasses import replace

import pytest

from dsq.costmodel.model.entries import CATEGORIES
from dsq.costmodel.model.memory import peak_memory
from dsq.costmodel.model.methods import BF16, Method
from dsq.costmodel.model.operations import Gemm, Workload
from dsq.costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.costmodel.workloads.shapes import Head, Stack, Transformer
from dsq.costmodel.workloads.transformer import Shard, build, stages

S, B, H, A, LAYERS = 60, 2, 96, 6, 4
GPT = Transformer(
    "gpt",
    Head("lm", 128, tied=True),
    decoder=Stack(
        "decoder", LAYERS, H, A, 4 * H, final_norm=True, tables=(("words", 128),), dropout=True, attention_dropout=True
    ),
    sequences=B,
    target_length=S,
)
SBH = S * B * H


def a_layer(workload: Workload) -> dict[str, float]:
    """Bytes that one layer keeps in bf16, by operation, without what Megatron's formula leaves out: statistics of norms
    and of attention, and PyTorch's fp32 copy of softmax's result."""
    widths, kept, seen = widths_of(BF16), {}, set()
    for group in workload.groups:
        for name in group.names:
            if not name.startswith("decoder.layers.1."):
                continue
            for stored in tensors_of(group, BF16):
                op = next(op for op in workload.operations if op.name == name)
                shared = (op.input if stored.name == "x" else "") or f"{name}.{stored.name}"
                shared = name if stored.name == "y" else shared
                exact = stored.width not in ("state", "cast")
                if stored.saved and exact and shared not in seen:
                    seen.add(shared)
                    size = layout_bytes(group, stored, BF16, widths)
                    kept[f"{name}.{stored.name}".removeprefix("decoder.layers.1.")] = size
    return kept


@pytest.mark.parametrize("t", [1, 2, 3, 6])
def test_tensor_and_sequence_parallel_forms(t):
    """sbh/t (34 + 5as/h), and without the scores where attention is made again (sections 4.2 and 5)."""
    (workload,) = stages(GPT, Shard(tensor=t))
    assert sum(a_layer(workload).values()) == pytest.approx(SBH / t * (34 + 5 * A * S / H))
    assert sum(a_layer(workload.fusing_attention()).values()) == pytest.approx(SBH / t * 34)


def test_shares_multiply_and_weigh_what_the_whole_does():
    whole = build(GPT)
    (half,) = stages(GPT, Shard(tensor=2))
    assert 2 * half.macs == whole.macs
    assert 2 * _weights(half) == _weights(whole)
    first, last = stages(GPT, Shard(pipeline=2))
    assert first.macs + last.macs == whole.macs
    assert _weights(first) + _weights(last) == _weights(whole) + 128 * H  # the head's table is the last stage's own


def _weights(workload: Workload) -> int:
    return sum(op.parameters - (op.N if op.bias else 0) for op in workload.operations if isinstance(op, Gemm))


def test_the_first_stage_keeps_as_much_as_the_whole_model():
    """1F1B: pipeline micro-batches at once, each of layers / pipeline layers (section 4.3)."""
    alone = peak_memory(build(replace(GPT, head=Head("none"))), Method("", BF16)).saved
    first, _ = stages(replace(GPT, head=Head("none")), Shard(pipeline=4))
    one = peak_memory(first, Method("", BF16, in_flight=4))
    held = one.bytes[len(first.operations), CATEGORIES.index("activations")]
    assert held == pytest.approx(alone, rel=0.1)


def test_norms_of_queries_and_keys_are_cut_with_their_heads_and_no_further():
    model = replace(GPT, decoder=replace(GPT.decoder, qk_norm=True))
    one, three = (stages(model, shard)[0] for shard in (Shard(), Shard(tensor=3)))
    whole, part = ([op.rows * op.width for op in it.operations if op.name.endswith("_norm")] for it in (one, three))
    assert len(whole) == 2 * LAYERS + 1  # the last is that of the stream, whose tokens are shared out
    assert part == [size // 3 for size in whole]


def test_keys_are_cut_or_copied_whole():
    grouped = replace(GPT, decoder=replace(GPT.decoder, heads=12, kv_heads=4))
    for tensor, keys in ((1, 4), (2, 2), (4, 1), (12, 1)):
        (part,) = stages(grouped, Shard(tensor=tensor))
        assert {op.N for op in part.gemms if op.name.endswith("k_proj")} == {keys * H // 12}
    with pytest.raises(ValueError, match=r"decoder.kv_heads \(4\) cannot be cut into 3, nor copied"):
        stages(grouped, Shard(tensor=3))
