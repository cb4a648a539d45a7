"""Checkpoint boundaries in few bits: bytes, time and gradient error on a GPT-2 of transformers (CPU).

    python -m analysis.stash.boundaries [--only bytes] [--width 256] [--tokens 2048] [--layers 12]

Random weights and tokens. All but the first row checkpoint every block.

    held        MiB that malloc holds at the end of forward and loss, in a process of its own (analysis.stash.allocator)
    boundaries  of these MiB, the blocks': held, less what the same model without blocks holds
    peak        MiB held at most in forward and backward
    error       |g - g0| / |g0| over all gradients, g0 from the plain model; the loss is the same, bit for bit
    time        of a step, over that with plain checkpoints: the median over rounds that took turns
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.stash.allocator.counted import figures
from analysis.stash.allocator.held import step_bytes
from analysis.stash.halves import halves_main, halves_parser, print_times, step
from analysis.timing.allocator import keep_freed_memory
from dsq.command.parser import OneLineParser, count
from dsq.command.table import table
from dsq.stash import packed_checkpoint

PROG = "python -m analysis.stash.boundaries"
MIB = 2**20
VOCABULARY = 256
PLAIN, BASELINE = "plain", "checkpoint"
#: what transformers calls a block with; None: no checkpoints
SETUPS: dict[str, Callable[..., Any] | None] = {
    PLAIN: None,
    BASELINE: partial(checkpoint, use_reentrant=False),
    "bfp 4": partial(packed_checkpoint, fmt=dsq.BFP(4)),
    "snvint 4": packed_checkpoint,
    "bfp 2": partial(packed_checkpoint, fmt=dsq.BFP(2)),
}


def parser() -> OneLineParser:
    """The command's options."""
    made = halves_parser(PROG, __doc__, rounds=3)
    made.add_argument("--width", type=count, default=256, help="of the residual stream (default 256)")
    made.add_argument("--tokens", type=count, default=2048, help="of one sequence (default 2048)")
    made.add_argument("--layers", type=count, default=12, help="blocks (default 12)")
    made.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    return made


def training(setup: str, layers: int, args: argparse.Namespace) -> tuple[Any, Callable[[], Tensor]]:
    """A model and the forward of its loss."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=args.width, n_layer=layers, n_head=4, n_positions=args.tokens, use_cache=False
    )
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.randint(VOCABULARY, (1, args.tokens))
    if SETUPS[setup] is not None:
        model._set_gradient_checkpointing(gradient_checkpointing_func=SETUPS[setup])

    def loss() -> Tensor:
        torch.manual_seed(1)  # one dropout for all
        return model(input_ids=ids, labels=ids).loss

    return model, loss


def counted_step(setup: str, layers: int, args: argparse.Namespace) -> tuple[dict[str, float], Tensor]:
    """Bytes and the gradient of one step, in a counted process."""
    model, loss = training(setup, layers, args)
    step(loss)
    model.zero_grad(set_to_none=False)
    held = step_bytes(loss, warm=0)
    return {"held": held.stash, "peak": held.peak}, torch.cat([p.grad.flatten() for p in model.parameters()])


def count_bytes(args: argparse.Namespace) -> dict[str, Any]:
    """The bytes and errors of all setups, in a counted process."""
    outside, _ = counted_step(BASELINE, 0, args)
    plain, exact = counted_step(PLAIN, args.layers, args)
    found = {PLAIN: plain | {"error": 0.0}}
    for setup in list(SETUPS)[1:]:
        nbytes, gradient = counted_step(setup, args.layers, args)
        found[setup] = nbytes | {"error": float((gradient - exact).norm() / exact.norm())}
    return {"outside": outside["held"], "setups": found}


def bytes_and_errors(args: argparse.Namespace) -> None:
    size = ["--width", args.width, "--tokens", args.tokens, "--layers", args.layers]
    found = figures("analysis.stash.boundaries", "--count", *size)
    blocks = {setup: values["held"] - found["outside"] for setup, values in found["setups"].items()}
    rows = [
        {
            "boundaries": setup,
            "held, MiB": values["held"] / MIB,
            "boundaries, MiB": blocks[setup] / MIB,
            "of checkpoint's": blocks[setup] / blocks[BASELINE],
            "peak, MiB": values["peak"] / MIB,
            "error": values["error"],
        }
        for setup, values in found["setups"].items()
    ]
    shown = dict.fromkeys(rows[0], ".2f") | {"boundaries": "", "of checkpoint's": ".3f", "error": ".4f"}
    print(table(rows, shown, markdown=True))


def times(args: argparse.Namespace) -> None:
    keep_freed_memory()
    losses = {setup: training(setup, args.layers, args)[1] for setup in (BASELINE, "bfp 4", "snvint 4")}
    print_times("boundaries", BASELINE, losses, args.rounds, ".3f")


if __name__ == "__main__":
    sys.exit(halves_main(parser(), count_bytes, bytes_and_errors, times))
