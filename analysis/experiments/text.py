"""Reads parallel text and labelled sentences, and learns subwords of them.

Parallel text: X.de beside X.en, or X.tsv with a column a language. A name is [PREFIX.]SPLIT[_MORE], as in train.de,
multi30k.val.tsv.xz and test_2016_flickr.en.gz; SPLIT is train; valid, val or dev; or test. Labelled sentences:
TASK.train.tsv and TASK.dev.tsv, or GLUE's own TASK/train.tsv. All files may be plain, .xz or .gz.
"""

import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SPLITS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
_OPEN: dict[str, Callable[..., IO[str]]] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
#: the names of columns that MNLI and QNLI have instead of ours
_OWN_NAMES = {"gold_label": "label", "question": "sentence1"}


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs of one split."""

    source: list[str]
    target: list[str]


@dataclass(frozen=True)
class LabelledSentences:
    """Labelled sentences, or pairs of sentences, of one split."""

    labels: list[str]
    inputs: list[list[str]]  #: for each input column (one or two), its sentences


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, plain, .xz or .gz. Raises ValueError where the file is not UTF-8, or not whole."""
    opener = _OPEN[path.suffix if path.suffix in _OPEN else ""]
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            return [line.rstrip("\r\n") for line in file]
    except UnicodeDecodeError:
        raise ValueError(f"--data: {path.name} is not UTF-8 text") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError):
        raise ValueError(f"--data: {path.name} is not a whole {path.suffix} file") from None


def read_parallel(
    folder: Path,
    source: str,
    target: str,
    prefix: str = "",
    columns: tuple[str, ...] = ("de", "en"),
    lowercase: bool = False,
) -> dict[str, ParallelText]:
    """The splits train, valid and test under ``folder``, without the pairs of which a side is empty.

    Args:
        columns: the languages of a .tsv file's columns, in order.
        lowercase: lower-case all text.
    Raises:
        ValueError: a split is missing, there twice, empty, not UTF-8, or of uneven length.
    """
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: no such directory; expected one with {_accepted(source, target)}")
    found = {split: _read_split(folder, split, source, target, prefix, columns) for split in SPLITS}
    change = str.lower if lowercase else str
    return {split: ParallelText(*([change(line) for line in side] for side in found[split])) for split in SPLITS}


def _accepted(source: str, target: str) -> str:
    files = f"NAME.{source} with NAME.{target} or as NAME.tsv, plain, .xz or .gz"
    return f"train, valid (or val, dev) and test, each as {files}"


def _read_split(
    folder: Path, split: str, source: str, target: str, prefix: str, columns: tuple[str, ...]
) -> tuple[list[str], list[str]]:
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
    return [a for a, _ in kept], [b for _, b in kept]


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
    """The prefixes that there are, if one was forgotten or misspelt."""
    every = "|".join(name for names in SPLITS.values() for name in names)
    starts = {match[1] for path in folder.iterdir() if (match := re.match(rf"(.+?)[._-]({every})[._-]", path.name))}
    asked = f" of the prefix {prefix!r}" if prefix else ""
    return f"{asked} (data.prefix could be {' or '.join(sorted(starts))})" if starts else asked


def _read_table(path: Path, columns: tuple[str, ...], source: str, target: str) -> list[tuple[str, str]]:
    missing = [language for language in (source, target) if language not in columns]
    if missing:
        raise ValueError(
            f"data.columns {','.join(columns)}: {missing[0]} is not among them; name {path.name}'s columns in order"
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


def read_tables(folder: Path, task: str) -> dict[str, LabelledSentences]:
    """The train and the dev table (as "valid") of labelled sentences. Raises ValueError."""
    train, dev = (read_labelled(folder, task, split) for split in ("train", "dev"))
    if len(train.inputs) != len(dev.inputs):
        raise ValueError(f"--data {folder}: the train and the dev table of {task} have other columns of sentences")
    unknown = set(dev.labels) - set(train.labels)
    if unknown:
        raise ValueError(f"--data {folder}: the dev table of {task} has labels that train has not: {min(unknown)!r}")
    return {"train": train, "valid": dev}


def read_labelled(folder: Path, task: str, split: str) -> LabelledSentences:
    """``folder/TASK.SPLIT.tsv``, or GLUE's ``folder/TASK/SPLIT.tsv``.

    Raises ValueError where the table is missing, empty, damaged, or has other columns or a row of other length than the
    first.
    """
    stems = [folder / f"{task}.{split}", *(folder / task.upper() / name for name in (split, f"{split}_matched"))]
    found = [path for stem in stems for end in ("", ".xz", ".gz") if (path := Path(f"{stem}.tsv{end}")).is_file()]
    accepted = f"{task}.{split}.tsv (or .xz, .gz) with columns label and sentence, or label, sentence1 and sentence2"
    if not found:
        raise ValueError(f"--data {folder}: no {accepted}")
    if len(found) > 1:
        several = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ValueError(f"--data {folder}: {split} of {task} is there more than once: {several}")
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(found[0]), start=1) if line]
    head, rows = lines[0][1] if lines else [], lines[1:]
    names = [_OWN_NAMES.get(name, name) for name in head]
    if "question" in head:  # QNLI, whose answer is called sentence
        names = ["sentence2" if name == "sentence" else name for name in names]
    columns = [name for name in ("sentence", "sentence1", "sentence2") if name in names]
    if "label" not in names or columns not in (["sentence"], ["sentence1", "sentence2"]) or not rows:
        raise ValueError(f"{found[0]}: has {len(rows)} rows of {head}, expected {accepted}")
    for number, cells in rows:
        if len(cells) != len(head):
            raise ValueError(f"{found[0]} line {number}: has {len(cells)} column(s), expected {len(head)} between tabs")
    table = dict(zip(names, zip(*(cells for _, cells in rows), strict=True), strict=True))
    return LabelledSentences([label.strip() for label in table["label"]], [list(table[name]) for name in columns])


def sha256(text: Mapping[str, ParallelText]) -> str:
    """The SHA-256 of the sentences, however packed their files are."""
    digest = hashlib.sha256()
    for split, part in text.items():
        for column in (part.source, part.target):
            digest.update(f"{split} {len(column)}\n".encode())
            for line in column:
                digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def train_bpe(sentences: Iterable[str], size: int) -> Any:
    """A SentencePieceProcessor of ``size`` subwords. Raises ValueError for a size that this text cannot give."""
    import sentencepiece  # tables are written without it

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"data.vocab {size}: sentencepiece cannot learn this number of subwords of this text ({why})"
        ) from None
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
