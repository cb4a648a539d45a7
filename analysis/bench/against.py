"""This tree against another checkout, timed in alternating processes.

    python -m analysis.bench.against /path/to/other/checkout [--parts step kernels tiny] [--rounds 5]

Both trees need their kernels built (python setup.py build_ext --inplace). A round starts one process for this tree and
two for the other, in an order that moves on by one each round. A process gives the least time of several turns of each
call (public_calls.py); a ratio is the median over the rounds of (this tree's time / the other's of the same round), its
spread the least and the greatest of them. The other tree's second process gives the ratio of that tree to itself: what
lies within its spread is noise. About 6 minutes on two idle cores.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from analysis.bench.other_tree import ROOT, check_tree, run_in
from analysis.bench.public_calls import PARTS, THREADS
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import table

PROG = "python -m analysis.bench.against"
#: a ratio above this is marked
SLOWER = 1.03

Times = dict[str, float]


def alternate(old: Path, parts: list[str], rounds: int) -> list[list[Times]]:
    """Times by round of this tree, of the old one, and of the old one again."""
    trees, times = (ROOT, old, old), [list[Times]() for _ in range(3)]
    for turn in range(rounds):
        for place in range(3):
            who = (turn + place) % 3
            times[who].append(json.loads(run_in(trees[who], "analysis.bench.public_calls", *parts)))
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    return times


def report(new: list[Times], old: list[Times], again: list[Times]) -> str:
    """A row a call, and how many ratios lie above SLOWER."""
    rows = []
    for name in old[0]:
        ratios, control = _ratios(name, new, old), _ratios(name, again, old)
        times = {f"{which} ms": median(t[name] for t in tree) * 1e3 for which, tree in (("old", old), ("new", new))}
        slower = "slower" if median(ratios) > SLOWER else ""
        rows.append(
            {"call": name, **times, "new/old": median(ratios), "spread": _spread(ratios)}
            | {"old/old": median(control), "its spread": _spread(control), "": slower}
        )
    columns = {name: ".3f" if isinstance(value, float) else "" for name, value in rows[0].items()}
    slower = sum(bool(row[""]) for row in rows)
    counted = f"{slower} of {len(rows)} ratios above {SLOWER}; {len(new)} rounds, {THREADS} threads"
    return f"{table(rows, columns)}\n{counted}"


def _ratios(name: str, tree: list[Times], old: list[Times]) -> list[float]:
    return [mine[name] / base[name] for mine, base in zip(tree, old, strict=True)]


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.3f}-{max(ratios):.3f}"


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the other checkout, its kernels built")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    return guarded(PROG, lambda: print(report(*alternate(check_tree(given.other), given.parts, given.rounds))))


if __name__ == "__main__":
    sys.exit(main())
