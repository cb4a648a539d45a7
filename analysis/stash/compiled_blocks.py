"""Stash policies on an encoder that inductor compiles, block by block or in one graph: bytes and time (CPU).

    python -m analysis.stash.compiled_blocks [--only bytes] [--blocks 4]

Pre-LN blocks, 256 wide, 4 heads of fused attention, 4 sequences of 256 tokens.

    held    MiB that malloc holds at the end of the forward, in a process of its own
    peak    MiB held at most in forward and backward
    error   |g - g0| / |g0| over all gradients, g0 from the eager model without policy
    time    of a step, over that of the eager model under bfp: the median over rounds that took turns
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from analysis.models import encoder
from analysis.stash.allocator.counted import figures
from analysis.stash.allocator.held import step_bytes
from analysis.stash.halves import halves_main, halves_parser, print_times, step
from analysis.timing.allocator import keep_freed_memory
from dsq import stash
from dsq.command.parser import OneLineParser, count
from dsq.command.table import table

PROG = "python -m analysis.stash.compiled_blocks"
MIB = 2**20
BASELINE = "eager, bfp"
OPTIONS: dict[str, dict[str, Any]] = {"bfp": {"bits": 4}, "gact": {"bits": 4, "adapt_interval": None}, "mesa": {}}
SETUPS = (
    "eager",
    "compiled",
    BASELINE,
    "compiled, bfp",
    "one graph",
    "one graph, bfp",
    "eager, gact",
    "compiled, gact",
    "eager, mesa",
    "compiled, mesa",
)


def parser() -> OneLineParser:
    """The command's options."""
    made = halves_parser(PROG, __doc__, rounds=7)
    made.add_argument("--blocks", type=count, default=4, help="default 4")
    made.add_argument("--count", choices=SETUPS, help=argparse.SUPPRESS)
    return made


def training(setup: str, blocks: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and the forward of its loss."""
    torch.manual_seed(0)
    model, x = encoder(blocks, 256, 4, 1024, sdpa=True), torch.randn(4, 256, 256)
    mode, _, policy = setup.partition(", ")
    if mode == "compiled":
        for block in list(model.children())[:blocks]:
            block.compile()
    run = torch.compile(model, fullgraph=True) if mode == "one graph" else model
    if policy:
        stash.apply(run, policy, **OPTIONS[policy])
    return model, lambda: run(x).square().mean()


def count_bytes(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes and error of a setup, in a counted process."""
    gradients = []
    for setup in ("eager", args.count):
        model, loss = training(setup, args.blocks)
        held = step_bytes(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    exact, found = gradients
    error = float((found - exact).norm() / exact.norm())
    return {"held, MiB": held.stash / MIB, "peak, MiB": held.peak / MIB, "error": error}


def bytes_and_errors(args: argparse.Namespace) -> None:
    program = "analysis.stash.compiled_blocks"
    rows = [{"blocks": setup} | figures(program, "--count", setup, "--blocks", args.blocks) for setup in SETUPS]
    print(table(rows, {"blocks": "", "held, MiB": ".1f", "peak, MiB": ".1f", "error": ".4f"}, markdown=True))


def times(args: argparse.Namespace) -> None:
    keep_freed_memory()
    losses = {setup: training(setup, args.blocks)[1] for setup in SETUPS if "gact" not in setup}
    for loss in (*losses.values(), *losses.values()):
        step(loss)  # warm: compiled, and under the policy's own estimates
    print_times("blocks", BASELINE, losses, args.rounds, ".2f")


if __name__ == "__main__":
    sys.exit(halves_main(parser(), count_bytes, bytes_and_errors, times))
