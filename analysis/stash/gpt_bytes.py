"""Bytes of a training step of the GPT-2 of analysis/bench/gpt.py: what malloc holds, a process a contestant.

python -m analysis.stash.gpt_bytes [--sequences 1]

between     MiB between steps: weights and Adam's moments
peak        MiB held at most in a step, gradients and update included
"""

import argparse
import json
import sys

from analysis.bench.gpt import CONTESTANTS, step_of
from analysis.stash.allocator.counted import Count, figures
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import table

PROG = "python -m analysis.stash.gpt_bytes"
MIB = 2**20


def counted(name: str, sequences: int) -> dict[str, float]:
    """MiB of the second step, in a counted process: between steps, and at its peak."""
    step, count = step_of(name, sequences), Count()
    step()
    between = count.live()
    count.reset_peak()
    step()
    return {"between": between / MIB, "peak": count.peak() / MIB}


def memory(sequences: int) -> str:
    """A row a contestant."""
    program = "analysis.stash.gpt_bytes"
    rows = [{"contestant": n} | figures(program, "--count", n, "--sequences", sequences) for n in CONTESTANTS]
    return table(rows, dict.fromkeys(rows[0], ".0f") | {"contestant": ""}, markdown=True)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--sequences", type=count, default=1, help="of 512 tokens in a batch (default 1)")
    parser.add_argument("--count", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.count:
        print(json.dumps(counted(given.count, given.sequences)))
        return 0
    return guarded(PROG, lambda: print(memory(given.sequences)))


if __name__ == "__main__":
    sys.exit(main())
