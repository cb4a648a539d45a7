"""How large the house is: python -m analysis.house [--tree CHECKOUT]

Files and lines of Python by room, and words of docs/*.md, in prose and in tables, of the files that git knows.
"""

import subprocess
import sys
from pathlib import Path

from analysis import ROOT
from dsq.command import OneLineParser, guarded, table

ROOMS = ("dsq", "kernels", "costmodel", "fairseq_plugin", "analysis")


def report(tree: Path) -> str:
    """A row a room, one of the product together, and one of its tests; then the words of the docs' prose and tables."""
    listed = subprocess.run(["git", "-C", tree, "ls-files", "*.py", "docs/*.md"], capture_output=True, text=True)
    if listed.returncode:
        raise ValueError(f"--tree {tree}: accepted are git checkouts")
    paths = [Path(name) for name in listed.stdout.splitlines() if (tree / name).is_file()]
    rows = []
    for name, rooms in (*((room, [room]) for room in ROOMS), ("product", ROOMS), ("tests", ["tests"])):
        texts = [(tree / path).read_text() for path in paths if path.parts[0] in rooms and path.suffix == ".py"]
        rows.append({"room": name, "files": len(texts), "lines": sum(text.count("\n") for text in texts)})
    lines = [line for path in paths if path.suffix == ".md" for line in (tree / path).read_text().splitlines()]
    prose, tables = (sum(len(x.split()) for x in lines if x.startswith("|") == tabled) for tabled in (False, True))
    return f"{table(rows)}\ndocs: {prose:,} words, and {tables:,} in tables"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.house", description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a git checkout (default: this one)")
    given = parser.parse_args(argv)
    return guarded(parser.prog, lambda: print(report(given.tree)))


if __name__ == "__main__":
    sys.exit(main())
