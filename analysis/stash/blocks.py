"""Blocks whose checkpoints are packed, and compiled blocks: bytes, gradient error and time (CPU).

    python -m analysis.stash.blocks boundaries|gpt2|compiled [--only bytes|time] [--rounds 5]

boundaries  GPT-2 of transformers: 12 blocks, 256 wide, one sequence of 2,048 tokens; all but the first row checkpoint
            every block
gpt2        the same at its own width of 768, without the plain row
compiled    4 pre-LN blocks, 256 wide, 4 heads of fused attention, 4 sequences of 256 tokens, compiled one
            by one or in one graph, by inductor

Random weights and inputs. Bytes and errors come from one process in which every malloc is counted
(analysis.stash.allocator).

    held    MiB at the end of forward and loss
    blocks  of these MiB, the blocks': held, less what the same model holds without blocks
    peak    MiB at most in forward and backward
    error   |g - g0| / |g0| over all gradients, g0 of the first row
    time    of a step, over the baseline's: the median over rounds in which all take turns
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.models import encoder
from analysis.stash.allocator.counted import figures
from analysis.stash.allocator.held import step_bytes
from analysis.timing import keep_freed_memory, race
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import table
from dsq.stash import packed_checkpoint

PROG = "python -m analysis.stash.blocks"
MIB = 2**20
Training = tuple[nn.Module, Callable[[], Tensor]]  #: a model and the forward of its loss

#: what transformers calls a block with; None: no checkpoints
CHECKPOINTS: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "bfp 4": partial(packed_checkpoint, fmt=dsq.BFP(4)),
    "snvint 4": packed_checkpoint,
    "bfp 2": partial(packed_checkpoint, fmt=dsq.BFP(2)),
}
POLICIES: dict[str, dict[str, Any]] = {
    "bfp": {"bits": 4, "format": "bfp"},
    "gact": {"bits": 4, "adapt_interval": None},
    "mesa": {},
}


def checkpointed(setup: str, blocks: int, width: int = 256) -> Training:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_embd=width, n_layer=blocks, n_head=width // 64, n_positions=2048, use_cache=False
    )
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.randint(256, (1, 2048))
    if CHECKPOINTS[setup] is not None:
        model._set_gradient_checkpointing(gradient_checkpointing_func=CHECKPOINTS[setup])

    def loss() -> Tensor:
        torch.manual_seed(1)  # one dropout for all
        return model(input_ids=ids, labels=ids).loss

    return model, loss


def compiled(setup: str, blocks: int) -> Training:
    torch.manual_seed(0)
    model, x = encoder(blocks, 256, 4, 1024, sdpa=True), torch.randn(4, 256, 256)
    mode, _, policy = setup.partition(", ")
    if mode == "compiled":
        for block in list(model.children())[:blocks]:
            block.compile()
    run: Any = torch.compile(model, fullgraph=True) if mode == "one graph" else model
    if policy:
        dsq.stash.apply(run, policy, **POLICIES[policy])
    return model, lambda: run(x).square().mean()


@dataclass(frozen=True)
class Comparison:
    training: Callable[[str, int], Training]  #: of a setup and a number of blocks
    setups: tuple[str, ...]  #: the first has the exact gradient
    baseline: str  #: of the times
    timed: tuple[str, ...]  #: beside it
    blocks: int


COMPARISONS = {
    "boundaries": Comparison(checkpointed, tuple(CHECKPOINTS), "checkpoint", ("bfp 4", "snvint 4"), 12),
    "gpt2": Comparison(partial(checkpointed, width=768), ("checkpoint", "snvint 4"), "checkpoint", ("snvint 4",), 12),
    "compiled": Comparison(
        compiled,
        (
            "eager",
            "compiled",
            *(f"{mode}, {policy}" for policy in POLICIES for mode in ("eager", "compiled")),
            *(f"one graph, {policy}" for policy in ("bfp", "mesa")),
        ),
        "eager, bfp",
        ("eager", "compiled", "compiled, bfp", "one graph, bfp", "eager, mesa", "compiled, mesa", "one graph, mesa"),
        4,
    ),
}


def counted(it: Comparison) -> list[dict[str, float]]:
    """MiB and error of each setup, in a counted process."""
    found, exact = [], torch.empty(0)
    for setup in it.setups:
        outside = step_bytes(it.training(setup, 0)[1]).stash
        model, loss = it.training(setup, it.blocks)
        held = step_bytes(loss)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        exact = exact if len(exact) else gradient
        error = float((gradient - exact).norm() / exact.norm())
        nbytes = {"held": held.stash, "blocks": held.stash - outside, "peak": held.peak}
        found.append({name: value / MIB for name, value in nbytes.items()} | {"error": error})
    return found


def show_bytes(name: str) -> None:
    rows = [
        {name: setup} | row
        for setup, row in zip(COMPARISONS[name].setups, figures("analysis.stash.blocks", name, "--count"), strict=True)
    ]
    print(table(rows, {name: "", "held": ".1f", "blocks": ".2f", "peak": ".1f", "error": ".4f"}, markdown=True))


def show_times(name: str, rounds: int) -> None:
    keep_freed_memory()
    it = COMPARISONS[name]

    def step_of(setup: str) -> Callable[[], None]:
        loss = it.training(setup, it.blocks)[1]
        loss().backward()  # compiled, and under the policy's own estimates
        return lambda: loss().backward()

    run = race("step", (it.baseline, step_of(it.baseline)), {setup: step_of(setup) for setup in it.timed}, rounds)
    rows = [{name: result.name, "time": result.ratio, "±": result.stray} for result in run.results]
    print(table(rows, {name: "", "time": ".3f", "±": ".3f"}, markdown=True))
    print(f"\n{it.baseline} against itself: {run.control.ratio:.3f} ± {run.control.stray:.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("name", choices=COMPARISONS, help="what to compare")
    parser.add_argument("--only", choices=("bytes", "time"), help="half of the work: bytes and error, or time")
    parser.add_argument("--rounds", type=count, default=5, help="timed steps of each setup (default: %(default)s)")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # the process that is counted
    given = parser.parse_args(argv)
    if given.count:
        print(json.dumps(counted(COMPARISONS[given.name])))
        return 0

    def work() -> None:
        if given.only != "time":
            show_bytes(given.name)
        if given.only != "bytes":
            show_times(given.name, given.rounds)

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
