"""Bytes of a training step, counted in a process of its own for each (analysis.stash.allocator).

Six blocks, forward and backward: what the layers stash, by dsq.stash.measure; and what malloc holds at the end of the
forward, and at most, above what it holds between steps. GPT-2 of gpt.py, forward, backward and Adam: what malloc holds
between steps, and at most in one.
"""

import json
import sys
from pathlib import Path

import torch

import dsq
from analysis.bench.gpt import CONTESTANTS, TOKENS, step_of
from analysis.models import encoder
from analysis.stash.allocator.counted import Count, figures
from analysis.stash.allocator.held import step_bytes
from dsq.command.files import write_text
from dsq.command.table import as_csv, table

MIB = 2**20
BATCH, LENGTH, WIDTH = 16, 128, 512
PRECISIONS = ("[32,32,32,32]", "[16,4,4,16]", "[4,4,4,16]", "[2,2,2,16]")
SEQUENCES = ("1", "4")  #: of GPT-2's batch


def run(out: Path) -> None:
    """Print a table of each model and write both to ``out``/stash.csv."""
    blocks = [_row(f"six blocks, {BATCH} x {LENGTH} tokens", precision) for precision in PRECISIONS]
    gpt = [_row(f"GPT-2 124M, {n} x {TOKENS} tokens", name, n) for n in SEQUENCES for name in CONTESTANTS]
    for rows in (blocks, gpt):
        print(table(rows, dict.fromkeys(rows[0], ".0f") | {"model": "", "setup": ""}), end="\n\n")
    write_text(out / "stash.csv", as_csv(blocks + gpt))
    print(f"written: {out / 'stash.csv'}")


def _row(model: str, setup: str, *sequences: str) -> dict[str, str | float]:
    return {"model": model, "setup": setup} | figures("analysis.bench.stash", setup, *sequences)


def of_blocks(precision: str) -> dict[str, float]:
    """MiB of a step of six blocks at ``precision``, in a counted process."""
    torch.manual_seed(0)
    model, x = dsq.convert(encoder(sdpa=True), dsq.DSQConfig(levels=precision)), torch.randn(BATCH, LENGTH, WIDTH)
    held = step_bytes(lambda: model(x).sum())
    stash = dsq.stash.measure(lambda: model(x).sum()).nbytes
    return {"stash MiB": stash / MIB, "held MiB": held.stash / MIB, "peak MiB": held.peak / MIB}


def of_gpt(contestant: str, sequences: int) -> dict[str, float]:
    """MiB of the second step of a contestant of gpt.py, in a counted process."""
    step, count = step_of(contestant, sequences), Count()
    step()
    between = count.live()
    count.reset_peak()
    step()
    return {"between MiB": between / MIB, "peak MiB": count.peak() / MIB}


if __name__ == "__main__":
    setup, *sequences = sys.argv[1:]
    print(json.dumps(of_gpt(setup, int(sequences[0])) if sequences else of_blocks(setup)))
