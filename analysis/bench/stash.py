"""Bytes of steps that steps.py times, counted in a process of its own for each (analysis.stash.allocator).

Six blocks, forward and backward: what malloc holds at the end of the forward, and at most, above what it holds between
steps. GPT-2, forward, backward and Adam: what malloc holds between steps, and at most in one.
"""

import json
import sys
from pathlib import Path

from analysis.bench.steps import AUTOCAST, LEVELS, blocks, gpt, step, train
from analysis.stash.allocator import Count, figures, step_bytes
from dsq.command import as_csv, table, write_text

MIB = 2**20
BLOCKS = ("fp32", AUTOCAST, *LEVELS, *(f"{levels} whole" for levels in LEVELS))
GPTS = ("fp32", AUTOCAST, "[4,4,4,16] whole", "[4,4,4,16] whole + autocast", "[8,4,4,8] whole + autocast")


def run(out: Path) -> None:
    """Print a table of each model and write both to ``out``/stash.csv."""
    cases = [("six blocks, d 512, 1024 tokens", name, 0) for name in BLOCKS]
    cases += [(f"GPT-2 124M, {sequences} x 512 tokens", name, sequences) for sequences in (1, 4) for name in GPTS]
    rows = [{"model": model, "setup": name} | figures("analysis.bench.stash", name, n) for model, name, n in cases]
    for some in (rows[: len(BLOCKS)], rows[len(BLOCKS) :]):
        print(table(some, dict.fromkeys(some[0], ".1f") | {"model": "", "setup": ""}), end="\n\n")
    write_text(out / "stash.csv", as_csv(rows, ".1f"))
    print(f"written: {out / 'stash.csv'}")


def counted(name: str, sequences: int) -> dict[str, float]:
    """MiB of a step of GPT-2, or of six blocks if ``sequences`` is 0, in a counted process."""
    if not sequences:
        held = step_bytes(train(name, blocks())[1])
        return {"held MiB": held.stash / MIB, "peak MiB": held.peak / MIB}
    call, count = step(name, gpt(sequences), warm=1, adam=True), Count()
    between = count.live()
    count.reset_peak()
    call()
    return {"between MiB": between / MIB, "peak MiB": count.peak() / MIB}


if __name__ == "__main__":
    print(json.dumps(counted(sys.argv[1], int(sys.argv[2]))))
