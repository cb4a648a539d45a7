"""This tree against another checkout, timed in alternating processes.

    python -m analysis.revisions.against /path/to/other/checkout [--parts step kernels tiny] [--rounds 5] [--threads 2]

Both trees need their kernels built (python setup.py build_ext --inplace). A round starts one process for this tree and
two for the other, in an order that moves on by one each round. A process gives the least time of several turns of each
call (public_calls.py); a ratio is the median over the rounds of (this tree's time / the other's of the same round), its
spread the least and the greatest of them. The other tree's second process gives the ratio of that tree to itself: what
lies within its spread is noise. About 6 minutes on two idle cores.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from analysis import ROOT
from analysis.revisions.other_tree import check_tree, run_in
from analysis.revisions.public_calls import PARTS
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import table

PROG = "python -m analysis.revisions.against"
#: a ratio above this is marked
SLOWER = 1.03

Times = dict[str, float]


def alternate(old: Path, parts: list[str], rounds: int, threads: int) -> list[list[Times]]:
    """Times by round of this tree, of the old one, and of the old one again."""
    trees, times = (ROOT, old, old), [list[Times]() for _ in range(3)]
    for turn in range(rounds):
        for place in range(3):
            who = (turn + place) % 3
            times[who].append(json.loads(run_in(trees[who], "analysis.revisions.public_calls", str(threads), *parts)))
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    return times


def report(new: list[Times], old: list[Times], again: list[Times]) -> str:
    """A row a call, and how many ratios lie above SLOWER."""
    rows: list[dict[str, Any]] = []
    for name in old[0]:
        ratios, control = _ratios(name, new, old), _ratios(name, again, old)
        row: dict[str, Any] = {
            "call": name,
            "old ms": 1e3 * median(t[name] for t in old),
            "new ms": 1e3 * median(t[name] for t in new),
        }
        row |= {"new/old": median(ratios), "spread": _spread(ratios), "old/old": median(control)}
        rows.append(row | {"its spread": _spread(control), "": "slower" if median(ratios) > SLOWER else ""})
    columns = {name: ".3f" if isinstance(value, float) else "" for name, value in rows[0].items()}
    slower = sum(row[""] == "slower" for row in rows)
    note = f"{slower} of {len(rows)} ratios above {SLOWER}; {len(new)} rounds"
    return f"{table(rows, columns)}\n{note}"


def _ratios(name: str, tree: list[Times], old: list[Times]) -> list[float]:
    return [mine[name] / base[name] for mine, base in zip(tree, old, strict=True)]


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.3f}-{max(ratios):.3f}"


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("other", type=Path, help="root of the other checkout, its kernels built")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="default: all")
    parser.add_argument("--rounds", type=count, default=5, help="default: %(default)s")
    parser.add_argument("--threads", type=count, default=2, help="of a process (default: %(default)s)")
    given = parser.parse_args(arguments)

    def work() -> None:
        print(report(*alternate(check_tree(given.other), given.parts, given.rounds, given.threads)))

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
