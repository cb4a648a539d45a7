"""llm-analysis's own example, OPT-1.3B in 16 bits on one GPU (its default), beside the ledger.

Its formulas (cli99/llm-analysis, llm_analysis/analysis.py, get_memory_* and training), in bytes, with s tokens, b
sequences, h the width, a heads: a parameter of a layer 2 (weight) + 16 (master copies of weight and gradient, moments)
+ 2 (gradient), of the embedding 2 alone; a layer's activations 10 sbh + sbh + a s^2 b (attention), 18 sbh + sbh (MLP),
8 sbh (norms, in fp32). Logits are left out.
"""

from dataclasses import replace

import pytest

from costmodel.model.memory import peak_memory
from costmodel.model.methods import BF16, Method
from costmodel.workloads.named import load_shapes
from costmodel.workloads.transformer import build

S, H, A, LAYERS, WORDS = 2048, 2048, 32, 24, 50272
SBH, SCORES = S * H, A * S * S
IN_LAYERS = LAYERS * 12 * H * H
THEIR_LAYER = 38 * SBH + SCORES
OPT = load_shapes("opt_1.3b")  # heads are views to it
WITH_MASKS = replace(OPT, decoder=replace(OPT.decoder, attention_dropout=True, heads_copied=False))


@pytest.mark.parametrize("sequences, theirs, printed", [(1, 31.4, 29.2), (2, 38.5, 35.8)])
def test_the_whole(sequences, theirs, printed):
    """In GB, and as it prints them, 1024^3 bytes as "G". The ledger has 12 sbh less: a relu's y is the next layer's x,
    and norms keep x in 16 bits. It has softmax's result twice more, logits, and 18 bytes for every parameter."""
    parameters = 20 * IN_LAYERS + 2 * WORDS * H
    whole = parameters + sequences * LAYERS * THEIR_LAYER
    assert whole == pytest.approx(theirs * 1e9, rel=0.002)
    assert whole == pytest.approx(printed * 2**30, rel=0.002)
    workload = build(replace(WITH_MASKS, sequences=sequences))
    memory = peak_memory(workload, Method("bf16", BF16))
    layers, logits = LAYERS * (THEIR_LAYER - 12 * SBH + 8 * SCORES), 4 * S * WORDS
    assert memory.saved == pytest.approx(sequences * (layers + logits), rel=0.005)
    assert memory.totals[-1] == 18 * workload.parameters
