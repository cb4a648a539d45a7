"""A training step of a GPT-2 of 124M parameters (d 768, 12 layers, 512 tokens) with Adam.

Its bytes: stash.py.

DSQ: all linears but the tied output head, and every other saved tensor packed (DSQConfig(stash="all")), in float32 or
under autocast. Random weights and tokens, no dropout, which would cost all alike.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis.timing import Race, keep_freed_memory, race

TOKENS, VOCABULARY = 512, 50257
AUTOCAST = "bf16 autocast"
#: contestant -> levels (None: not converted), and whether it runs under autocast
CONTESTANTS: dict[str, tuple[str | None, bool]] = {
    "fp32": (None, False),
    AUTOCAST: (None, True),
    "dsq [4,4,4,16]": ("[4,4,4,16]", False),
    "dsq [4,4,4,16], autocast": ("[4,4,4,16]", True),
    "dsq [4,4,4,8], autocast": ("[4,4,4,8]", True),
    "dsq [16,4,4,16], autocast": ("[16,4,4,16]", True),
}


def races(rounds: int) -> Iterator[Race]:
    keep_freed_memory()
    steps = {name: step_of(name, 1) for name in CONTESTANTS}
    gc.freeze()  # a full collection goes through all that transformers made: a seventh of the step in which it falls
    title = f"GPT-2 124M, {TOKENS} tokens, {torch.get_num_threads()} threads"
    yield race(title, (AUTOCAST, steps.pop(AUTOCAST)), steps, rounds)


def step_of(name: str, sequences: int) -> Callable[[], None]:
    """Forward, backward and a step of Adam, gradients dropped; converted models have dsq's attention too."""
    loss, model = training(name, sequences)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    attention = nullcontext if CONTESTANTS[name][0] is None else dsq.fused_attention

    def step() -> None:
        with attention():
            loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training(name: str, sequences: int) -> tuple[Callable[[], Tensor], nn.Module]:
    """The forward of a contestant's loss, and its model."""
    import transformers

    torch.manual_seed(0)
    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, use_cache=False, **rates)
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    levels, autocast = CONTESTANTS[name]
    if levels is not None:
        dsq.convert(model, dsq.DSQConfig(levels=levels, stash="all", exclude="lm_head"))
    ids = torch.randint(VOCABULARY, (sequences, TOKENS))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return loss, model
