"""python -m analysis.corpus OUT: write the generated corpus as parallel text."""

import sys
from pathlib import Path

from analysis.corpus.generate import write
from dsq.command.parser import OneLineParser, count, guarded


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.corpus", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of train, valid and test, each .de and .en")
    parser.add_argument("--sentences", type=count, default=20_000, help="of the training text (default: %(default)s)")
    parser.add_argument("--held-out", type=count, default=500, help="of valid, and of test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded(parser.prog, lambda: write(given.out, given.sentences, given.held_out, given.seed))


if __name__ == "__main__":
    sys.exit(main())
