"""Finds and reads parallel text: X.de beside X.en, or X.tsv with a column a language; .xz and .gz as they are.

A file's name is [PREFIX.]SPLIT[_MORE], with SPLIT one of train; valid, val or dev; test: train.de, multi30k.val.tsv.xz,
test_2016_flickr.en.gz.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from analysis.experiments.text.lines import read_lines

SPLITS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class ParallelText:
    source: list[str]
    target: list[str]
    dropped: int  #: pairs left out because one side was empty

    def __len__(self) -> int:
        return len(self.source)

    @property
    def columns(self) -> list[list[str]]:
        return [self.source, self.target]


def read_parallel(
    folder: Path, source: str, target: str, prefix: str = "", columns: tuple[str, ...] = ("de", "en")
) -> dict[str, ParallelText]:
    """The splits train, valid and test under folder.

    Args:
        columns: the languages of a .tsv file's columns, in order.
    Raises:
        ValueError: a split that is missing, there twice, empty, not UTF-8, or of uneven length.
    """
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: no such directory; expected one with {_accepted(source, target)}")
    return {split: _read_split(folder, split, source, target, prefix, columns) for split in SPLITS}


def _accepted(source: str, target: str) -> str:
    files = f"NAME.{source} with NAME.{target} or as NAME.tsv, plain, .xz or .gz"
    return f"train, valid (or val, dev) and test, each as {files}"


def _read_split(
    folder: Path, split: str, source: str, target: str, prefix: str, columns: tuple[str, ...]
) -> ParallelText:
    found = {kind: _find(folder, split, prefix, kind) for kind in (source, target, "tsv")}
    if found["tsv"] and not found[source]:
        pairs = _read_table(_only(found["tsv"], split), columns, source, target)
    elif found[source] and found[target]:
        sides = [read_lines(_only(found[side], split)) for side in (source, target)]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"--data: {found[source][0].name} has {len(sides[0])} lines, {found[target][0].name} {len(sides[1])}; "
                "expected one sentence a line, the same number in both"
            )
        pairs = list(zip(*sides, strict=True))
    else:
        hint = _hint(folder, prefix)
        raise ValueError(f"--data {folder}: no {split} text{hint}; expected {_accepted(source, target)}")
    kept = [(a.strip(), b.strip()) for a, b in pairs if a.strip() and b.strip()]
    if not kept:
        raise ValueError(f"--data {folder}: the {split} text holds no sentence pair")
    return ParallelText([a for a, _ in kept], [b for _, b in kept], len(pairs) - len(kept))


def _find(folder: Path, split: str, prefix: str, kind: str) -> list[Path]:
    names = "|".join(SPLITS[split])
    start = re.escape(prefix) + "[._-]" if prefix else ""
    pattern = re.compile(rf"{start}({names})([._-][^.]+)?\.{re.escape(kind)}(\.xz|\.gz)?")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _only(paths: list[Path], split: str) -> Path:
    if len(paths) > 1:
        raise ValueError(f"--data: {split} is there more than once: {', '.join(path.name for path in paths)}")
    return paths[0]


def _hint(folder: Path, prefix: str) -> str:
    """Which prefixes there are, if the folder looks as if one was forgotten or misspelt."""
    every = "|".join(name for names in SPLITS.values() for name in names)
    starts = {match[1] for path in folder.iterdir() if (match := re.match(rf"(.+?)[._-]({every})[._-]", path.name))}
    asked = f" of the prefix {prefix!r}" if prefix else ""
    return f"{asked} (--prefix could be {' or '.join(sorted(starts))})" if starts else asked


def _read_table(path: Path, columns: tuple[str, ...], source: str, target: str) -> list[tuple[str, str]]:
    missing = [language for language in (source, target) if language not in columns]
    if missing:
        raise ValueError(
            f"--columns {','.join(columns)}: {missing[0]} is not among them; name {path.name}'s columns in order"
        )
    at = columns.index(source), columns.index(target)
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        if len(cells) < len(columns) and line:
            raise ValueError(
                f"--data: {path.name} line {number} has {len(cells)} column(s); expected {len(columns)} between tabs"
            )
        if line:
            pairs.append((cells[at[0]], cells[at[1]]))
    return pairs
