"""Parallel text in every form that is read, and what is said of text that cannot be used."""

import gzip
import lzma
from pathlib import Path

import pytest

from analysis.experiments.text.parallel_text import read_parallel

PAIRS = {
    "train": [("Ein Hund.", "A dog."), ("Zwei Hunde.", "Two dogs.")],
    "valid": [("Drei.", "Three.")],
    "test": [("Vier.", "Four.")],
}


def as_lines(folder: Path, names: dict[str, str], opener=open, ending: str = "") -> None:
    for split, name in names.items():
        for side, language in enumerate(("de", "en")):
            with opener(folder / f"{name}.{language}{ending}", "wt", encoding="utf-8") as file:
                file.writelines(pair[side] + "\n" for pair in PAIRS[split])


def as_tables(folder: Path, names: dict[str, str]) -> None:
    for split, name in names.items():
        with lzma.open(folder / f"{name}.tsv.xz", "wt", encoding="utf-8") as file:
            file.writelines("\t".join(pair) + "\n" for pair in PAIRS[split])


def pairs_of(text):
    return {split: list(zip(part.source, part.target, strict=True)) for split, part in text.items()}


def test_reads_a_file_a_language_plain_or_compressed(tmp_path):
    as_lines(tmp_path, {"train": "train", "valid": "dev"})
    as_lines(tmp_path, {"test": "test_2016"}, gzip.open, ".gz")
    assert pairs_of(read_parallel(tmp_path, "de", "en")) == PAIRS


def test_reads_tables_of_one_corpus_among_several_in_either_direction(tmp_path):
    for corpus in ("one", "two"):
        as_tables(
            tmp_path, {"train": f"{corpus}.train", "valid": f"{corpus}.val", "test": f"{corpus}.test_2016_flickr"}
        )
    assert pairs_of(read_parallel(tmp_path, "de", "en", prefix="two")) == PAIRS
    reverse = read_parallel(tmp_path, "en", "de", prefix="two")
    assert reverse["train"].source == ["A dog.", "Two dogs."]


def test_drops_pairs_with_an_empty_side_and_says_how_many(tmp_path):
    as_lines(tmp_path, {split: split for split in PAIRS})
    (tmp_path / "train.de").write_text("Ein Hund.\n\nDrei.\n")
    (tmp_path / "train.en").write_text("A dog.\nTwo.\n \n")
    train = read_parallel(tmp_path, "de", "en")["train"]
    assert (train.source, train.target, train.dropped) == (["Ein Hund."], ["A dog."], 2)


def broken(folder: Path, case: str) -> None:
    as_lines(folder, {split: split for split in PAIRS})
    match case:
        case "uneven":
            (folder / "valid.en").write_text("Three.\nFour.\n")
        case "not text":
            (folder / "test.de").write_bytes(b"\xff\xfe\xfa\n")
        case "empty":
            for side in ("de", "en"):
                (folder / f"train.{side}").write_text("")
        case "missing":
            (folder / "test.en").unlink()
        case "twice":
            (folder / "dev.de").write_text("Drei.\n")
        case "cut short":
            for side in ("de", "en"):
                (folder / f"test.{side}").unlink()
            (folder / "test.tsv.xz").write_bytes(lzma.compress(b"Vier.\tFour.\n" * 99)[:-20])
        case "damaged":
            (folder / "test.de").unlink()
            whole = gzip.compress(b"Vier.\n" * 99, mtime=0)
            (folder / "test.de.gz").write_bytes(whole[:10] + b"\xff" * 4 + whole[14:])
        case "one column":
            for side in ("de", "en"):
                (folder / f"test.{side}").unlink()
            (folder / "test.tsv").write_text("Vier.\tFour.\nonly\n")


@pytest.mark.parametrize(
    "case, words",
    [
        ("uneven", "valid.de has 1 lines, valid.en 2"),
        ("not text", "test.de is not UTF-8"),
        ("empty", "the train text holds no sentence pair"),
        ("missing", "no test text; expected train, valid"),
        ("twice", "valid is there more than once: dev.de, valid.de"),
        ("cut short", "test.tsv.xz is not a whole .xz file"),
        ("damaged", "test.de.gz is not a whole .gz file"),
        ("one column", "test.tsv line 2 has 1 column(s); expected 2"),
    ],
)
def test_text_that_cannot_be_used_is_named(case, words, tmp_path):
    broken(tmp_path, case)
    with pytest.raises(ValueError) as raised:
        read_parallel(tmp_path, "de", "en")
    assert words in str(raised.value)


def test_a_forgotten_prefix_is_suggested(tmp_path):
    as_tables(tmp_path, {split: f"multi30k.{split}" for split in PAIRS})
    with pytest.raises(ValueError, match="--prefix could be multi30k"):
        read_parallel(tmp_path, "de", "en")
