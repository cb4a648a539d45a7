"""Bytes of the steps that step.py and gpt.py time, counted in a process of its own for each (analysis.stash.allocator).

Six blocks, forward and backward: what malloc holds at the end of the forward, and at most, above what it holds between
steps. GPT-2, forward, backward and Adam: what malloc holds between steps, and at most in one.
"""

import json
import sys
from pathlib import Path

import torch

import dsq
from analysis.bench import gpt
from analysis.bench.step import BATCH, LENGTH, WIDTH, loss_of
from analysis.models import encoder
from analysis.stash.allocator.counted import Count, figures
from analysis.stash.allocator.held import step_bytes
from dsq.command.files import write_text
from dsq.command.table import as_csv, table

MIB = 2**20
PLAIN = ("fp32", "bf16 autocast")
LEVELS = ("[16,4,4,16]", "[4,4,4,8]", "[4,3,3,8]", "[8,4,4,8]", "[2,2,2,8]")
PACKED = "whole stash packed"
SEQUENCES = ("1", "4")  #: of GPT-2's batch


def run(out: Path) -> None:
    """Print a table of each model and write both to ``out``/stash.csv."""
    setups = [*PLAIN, *LEVELS, *(f"{levels}, {PACKED}" for levels in LEVELS)]
    blocks = [_row(f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens", setup) for setup in setups]
    gpts = [_row(f"GPT-2 124M, {n} x {gpt.TOKENS} tokens", name, n) for n in SEQUENCES for name in gpt.CONTESTANTS]
    for rows in (blocks, gpts):
        print(table(rows, dict.fromkeys(rows[0], ".1f") | {"model": "", "setup": ""}), end="\n\n")
    write_text(out / "stash.csv", as_csv(blocks + gpts, ".1f"))
    print(f"written: {out / 'stash.csv'}")


def _row(model: str, setup: str, *sequences: str) -> dict[str, str | float]:
    return {"model": model, "setup": setup} | figures("analysis.bench.stash", setup, *sequences)


def of_blocks(setup: str) -> dict[str, float]:
    """MiB of a step of six blocks, in a counted process."""
    torch.manual_seed(0)
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    levels, _, packed = setup.partition(", ")
    if setup not in PLAIN:
        dsq.convert(model, dsq.DSQConfig(levels=levels, stash="all" if packed else "linears"))
    held = step_bytes(loss_of(model, x, autocast=setup == PLAIN[1]))
    return {"held MiB": held.stash / MIB, "peak MiB": held.peak / MIB}


def of_gpt(contestant: str, sequences: int) -> dict[str, float]:
    """MiB of the second step of a contestant of gpt.py, in a counted process."""
    step, count = gpt.step_of(contestant, sequences), Count()
    step()
    between = count.live()
    count.reset_peak()
    step()
    return {"between MiB": between / MIB, "peak MiB": count.peak() / MIB}


if __name__ == "__main__":
    setup, *sequences = sys.argv[1:]
    print(json.dumps(of_gpt(setup, int(sequences[0])) if sequences else of_blocks(setup)))
