"""Conservation: every read was written, at the width it was written in; over random models and precisions."""

import random
from collections import defaultdict
from itertools import chain
from typing import Any, get_args

import pytest

from dsq.costmodel.model.ledger import (
    AFTER,
    BACKWARD,
    BATCH,
    BEFORE,
    FOR_GRADIENT,
    FORWARD,
    POINTWISE,
    PRODUCTS,
    UPDATE,
)
from dsq.costmodel.model.methods import AUTOCAST, Setup
from dsq.costmodel.model.operations import Gemm, Pointwise, Workload
from dsq.costmodel.model.traffic import layout_bytes, tensors_of, widths_of
from dsq.costmodel.workloads.shapes import Head, Stack, Transformer
from dsq.costmodel.workloads.transformer import build
from dsq.formats import BFP, FixedPoint, Identity
from dsq.precision import Precision
from dsq.stash_bits import Role
from tests.costmodel.workloads.models import quantizing_attention

ORDER = {BATCH: -1, BEFORE: 0, FORWARD: 0, AFTER: 1, BACKWARD: 1, UPDATE: 2}
FLAGS = ("dropout", "attention_dropout", "heads_copied", "fused_qkv", "transposed")
FLAGS += ("gated", "rms", "mlp_bias", "final_norm")


def random_workload(rng: random.Random) -> Workload:
    heads, words, tied = rng.choice((1, 2, 4)), rng.randint(2, 50), rng.random() < 0.5
    width = heads * rng.randint(1, 9)
    options: dict[str, Any] = {name: rng.random() < 0.5 for name in FLAGS}
    options |= {"kv_heads": rng.choice((0, 1)), "rotary": rng.choice((0, 0.5, 1)), "tables": (("words", words),)}
    options |= {"activation": rng.choice(("activation", "relu", "gelu_new", "quick_gelu"))}
    stack = Stack("decoder", rng.randint(1, 3), width, heads, rng.randint(1, 70), **options)
    head = Head("lm", words, tied=tied)
    workload = build(Transformer("random", head, decoder=stack, target_length=rng.randint(1, 40)))
    if rng.random() < 0.5:
        workload = workload.fusing_attention()
    if rng.random() < 0.3:
        workload = quantizing_attention(workload)
    return workload.excluding("fc1|up_proj") if rng.random() < 0.3 else workload


def random_setup(rng: random.Random) -> Setup:
    template = rng.choice((BFP(32), BFP(32, block_size=8), FixedPoint(32), Identity()))
    widths = (16, 32) if isinstance(template, Identity) else (2, 3, 4, 8, 16, 32)
    return Setup(template, Precision(*(rng.choice(widths) for _ in range(4))))


@pytest.mark.parametrize("seed", range(40))
def test_every_read_was_written_and_widths_agree(seed):
    rng = random.Random(seed)
    workload, setup = random_workload(rng), random_setup(rng)
    widths, between = widths_of(setup), defaultdict(set)
    for group in workload.groups:
        for stored in tensors_of(group, setup):
            size = layout_bytes(group, stored, setup, widths)
            for read in stored.reads:
                assert (
                    ORDER.get(read, ORDER[BACKWARD]) >= ORDER[stored.written] or stored.written == UPDATE
                )  # by the step before
            if not stored.own or (stored.written in (FORWARD, BACKWARD) and stored.name.endswith(("y", "x"))):
                # what crosses from one operation to another
                between[stored.written in (AFTER, BACKWARD)].add(stored.width)
            if stored.saved:
                assert {BACKWARD, *FOR_GRADIENT} & set(stored.reads)
            assert size >= 0
    assert between[True] <= {"a", "r", "state"}  # state: gradients of tied weights, to be summed
    assert between[False] <= {"a", "r", "ids", "state"}  # dw reaches the update as it was written: state
    assert setup.autocast or widths["a"] == widths["r"]


@pytest.mark.parametrize("seed", range(20))
def test_autocast_products_read_what_they_cast(seed):
    """Whatever a layer multiplies in 16 bits it has written in 16 bits, from what was there in fp32."""
    workload, setup = random_workload(random.Random(seed)), AUTOCAST
    widths = widths_of(setup)
    for group in workload.groups:
        op = group.operation
        if isinstance(op, Gemm) and op.weight:
            stored = {tensor.name: tensor for tensor in tensors_of(group, setup)}
            assert widths[stored["w"].width] == 16
            assert stored["w"].own
            assert widths[stored["w in fp32"].width] == 32
            assert ("x in fp32" in stored) == op.stream
            assert stored["x"].own == op.stream


def test_every_kept_tensor_is_read_in_the_backward():
    for kind, tensors in POINTWISE.items():
        for stored in tensors:
            kept = stored.written in (BEFORE, FORWARD) and BACKWARD in stored.reads
            assert stored.saved == kept, (kind, stored.name)


def test_every_word_of_the_ledger_is_known():
    """ledger.toml: a misspelt field is refused as it is read, a misspelt value here."""
    widths = widths_of(AUTOCAST)
    a_pass, product = Pointwise("", "", 1, 1), Gemm("", 1, 1, 1)
    ways = {*get_args(Role), "bit", "recomputed", ""}
    for stored in (*chain(*POINTWISE.values()), *chain(*PRODUCTS.values())):
        assert stored.width in widths, stored
        assert {stored.coded, stored.copied} <= ways, stored
        assert stored.written in ORDER, stored
        assert set(stored.reads) <= {FORWARD, BACKWARD, UPDATE, *FOR_GRADIENT}, stored
        assert set(stored.shape) <= set("MNK") or stored.shape == "values" or hasattr(a_pass, stored.shape), stored
        assert not stored.needs or hasattr(a_pass, stored.needs) or hasattr(product, stored.needs), stored
