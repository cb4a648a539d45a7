"""Digests of what dsq computes, so that one revision can be held against another to the bit.

    python -m analysis.revisions.record_bits --tree OTHER_CHECKOUT --out FILE.json
    python -m analysis.revisions.record_bits --against FILE.json    prints what differs in this tree, exits 1 if any

The order of a GEMM's sums depends on the machine, on the number of threads, on PyTorch's version and on the GEMM that
was the fastest: compare only what was recorded on one machine, with one PyTorch and one DSQ_GEMM. That is why no
digests are committed. The cases are in digests.py.
"""

import json
import sys
from pathlib import Path

from analysis import ROOT
from analysis.revisions.other_tree import check_tree, run_in
from dsq.command.files import check_writable, write_text
from dsq.command.parser import OneLineParser, guarded

PROG = "python -m analysis.revisions.record_bits"


def record(tree: Path, out: Path | None, against: Path | None) -> None:
    """Raises ValueError where a digest differs from the one in ``against``."""
    old: dict[str, str] = {} if against is None else json.loads(against.read_text(encoding="utf-8"))
    if out is not None:
        check_writable(out)
    text = run_in(check_tree(tree), "analysis.revisions.digests")
    new: dict[str, str] = json.loads(text)
    print(f"{len(new):,} digests of {tree}, {sum(value.startswith('raised ') for value in new.values())} cases raised")
    if out is not None:
        write_text(out, text)
    if against is None:
        return
    differing = [key for key in old | new if old.get(key) != new.get(key)]
    for key in differing:
        print(f"{key}: {old.get(key, 'not recorded')[:80]} -> {new.get(key, 'not recorded')[:80]}")
    print(f"{len(differing):,} of {len(old | new):,} differ")
    if differing:
        raise SystemExit(1)


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout, its kernels built (default: this one)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the digests")
    parser.add_argument("--against", type=Path, metavar="FILE.json", help="digests to compare with")
    given = parser.parse_args(arguments)
    if given.out is None and given.against is None:
        parser.error("give --out FILE.json, --against FILE.json or both")
    return guarded(PROG, lambda: record(given.tree, given.out, given.against))


if __name__ == "__main__":
    sys.exit(main())
