"""A training step of a GPT-2 of 124M parameters (d 768, 12 layers, 512 tokens) with Adam: tokens a second, and memory.

    python -m analysis.bench gpt [--rounds 3]          # time
    python -m analysis.bench.gpt [--sequences 1]       # bytes that malloc holds, a process a contestant

DSQ: all linears but the tied output head, and every other saved tensor packed (DSQConfig(stash="all")). Random weights
and tokens, no dropout, which would cost all alike.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis.bench.memory import keep_freed_memory
from analysis.bench.race import Race, race
from analysis.stash.allocator.counted import Count, build, run
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import table

PROG = "python -m analysis.bench.gpt"
TOKENS, VOCABULARY, MIB = 512, 50257, 2**20
AUTOCAST = "bf16 autocast"
#: contestant -> levels; None: not converted
LEVELS = {"fp32": None, AUTOCAST: None, "dsq [4,4,4,16]": "[4,4,4,16]", "dsq [16,4,4,16]": "[16,4,4,16]"}


def races(rounds: int) -> Iterator[Race]:
    keep_freed_memory()
    steps = {name: step_of(name, 1) for name in LEVELS}
    title = f"GPT-2 124M, {TOKENS} tokens, {torch.get_num_threads()} threads"
    yield race(title, (AUTOCAST, steps.pop(AUTOCAST)), steps, rounds)


def step_of(name: str, sequences: int) -> Callable[[], None]:
    """Forward, backward and a step of Adam, gradients dropped."""
    loss, model = training(name, sequences)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step() -> None:
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
    if LEVELS[name] is not None:
        dsq.convert(model, dsq.DSQConfig(levels=LEVELS[name], stash="all", exclude="lm_head"))
    ids = torch.randint(VOCABULARY, (sequences, TOKENS))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=name == AUTOCAST):
            found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return loss, model


def counted(name: str, sequences: int) -> dict[str, float]:
    """MiB of the second step, in a counted process: between steps, and at its peak."""
    step, count = step_of(name, sequences), Count()
    step()
    between = count.live()
    count.reset_peak()
    step()
    return {"between steps": between / MIB, "peak": count.peak() / MIB, "peak above": (count.peak() - between) / MIB}


def memory(sequences: int) -> str:
    """A row a contestant."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for name in LEVELS:
            printed = run(library, ["-m", "analysis.bench.gpt", "--count", name, "--sequences", str(sequences)])
            rows.append({"contestant": name} | json.loads(printed.splitlines()[-1]))
    return table(rows, dict.fromkeys(rows[0], ".0f") | {"contestant": ""}, markdown=True)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1, help="of 512 tokens in a batch (default 1)")
    parser.add_argument("--count", choices=tuple(LEVELS), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.count:
        print(json.dumps(counted(given.count, given.sequences)))
        return 0
    return guarded(PROG, lambda: print(memory(given.sequences)))


if __name__ == "__main__":
    sys.exit(main())
