"""python -m analysis.corpus OUT --sentences N --seed S"""

import sys
from pathlib import Path

from analysis.command import OneLineParser, guarded
from analysis.corpus.generate import write

PROG = "python -m analysis.corpus"


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog=PROG,
        description="Write a generated German-English corpus: {train,valid,test}.{de,en}.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for the six files; made if missing")
    parser.add_argument("--sentences", type=int, default=20000, help="training pairs (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=500, help="pairs in valid, and in test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same files (default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: write(given.out, given.sentences, given.held_out, given.seed))


if __name__ == "__main__":
    sys.exit(main())
