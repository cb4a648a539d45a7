"""Files of sentence pairs and of labeled sentences, plain or .xz, with tabs between columns; and subwords."""

import io
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: two sentences that say the same
Pair = tuple[str, str]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises ValueError where the file is not UTF-8, or not whole."""
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return [line.rstrip("\r") for line in content.decode("utf-8-sig").removesuffix("\n").split("\n")]
    except UnicodeDecodeError:
        raise ValueError(f"--data: {path.name} is not UTF-8 text") from None
    except lzma.LZMAError:
        raise ValueError(f"--data: {path.name} is not a whole {path.suffix} file") from None


def read_pairs(path: Path, count: int | None = None) -> list[Pair]:
    """The first two columns of a table, without the pairs of which a side is empty.

    ``count``: so many lines, every n-th, so that the cut is as long and as short as the whole; None: all.
    Raises ValueError where a line has one column, or no pair is left.
    """
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1) if line]
    if count is not None:
        lines = lines[:: max(1, len(lines) // count)][:count]
    for number, cells in lines:
        if len(cells) < 2:
            raise ValueError(f"--data: {path.name} line {number} has 1 column; expected 2 with a tab between")
    pairs = [(cells[0].strip(), cells[1].strip()) for _, cells in lines]
    if not any(complete := [pair for pair in pairs if all(pair)]):
        raise ValueError(f"--data: {path.name} holds no sentence pair")
    return complete


@dataclass(frozen=True)
class LabeledSentences:
    """Labeled sentences, or pairs of sentences, of one split."""

    labels: list[str]
    inputs: list[list[str]]  #: for each input column (one or two), its sentences


def read_labeled(path: Path) -> LabeledSentences:
    """A table with a head. Raises ValueError where it is empty, has other columns, or a row of another length."""
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1) if line]
    head, rows = lines[0][1] if lines else [], lines[1:]
    columns = [name for name in ("sentence", "sentence1", "sentence2") if name in head]
    if "label" not in head or columns not in (["sentence"], ["sentence1", "sentence2"]) or not rows:
        accepted = "columns label and sentence, or label, sentence1 and sentence2"
        raise ValueError(f"--data: {path.name} has {len(rows)} rows of {head}; expected {accepted}")
    for number, cells in rows:
        if len(cells) != len(head):
            raise ValueError(f"--data: {path.name} line {number} has {len(cells)} columns; expected {len(head)}")
    table = dict(zip(head, zip(*(cells for _, cells in rows), strict=True), strict=True))
    return LabeledSentences([label.strip() for label in table["label"]], [list(table[name]) for name in columns])


def train_bpe(sentences: Iterable[str], size: int) -> Any:
    """A SentencePieceProcessor of ``size`` subwords. Raises ValueError for a size that this text cannot give."""
    import sentencepiece

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
            f"vocab {size}: sentencepiece cannot learn this number of subwords of this text ({why})"
        ) from None
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
