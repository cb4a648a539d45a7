"""Tables of labelled sentences."""

import lzma
from pathlib import Path

import pytest

from analysis.experiments.text.labelled import LabelledSentences, read_labelled


def test_reads_pairs_with_quotes_as_they_are(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "toy.dev.tsv.xz", "wt") as file:
        file.write('label\tsentence1\tsentence2\n1\tsay "NA\ta "b" \\\n')
    table = read_labelled(tmp_path, "toy", "dev")
    assert table == LabelledSentences(["1"], [['say "NA'], ['a "b" \\']])


@pytest.mark.parametrize("header", [("label", "text"), ("sentence", "text"), ("label", "sentence1")])
def test_other_columns_are_refused(tmp_path: Path, header: tuple[str, ...]) -> None:
    (tmp_path / "toy.dev.tsv").write_text("\t".join(header) + "\n1\tx\n")
    with pytest.raises(ValueError, match=r"toy\.dev\.tsv.* expected .*label and sentence"):
        read_labelled(tmp_path, "toy", "dev")


def test_line_ends_marks_and_empty_lines_of_other_systems_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "toy.dev.tsv").write_bytes("\ufefflabel\tsentence\r\n1 \ta\r\n\r\n0\tb\u2028c\rd\r\n".encode())
    assert read_labelled(tmp_path, "toy", "dev") == LabelledSentences(["1", "0"], [["a", "b\u2028c\rd"]])


@pytest.mark.parametrize("rows", ["1\ta\t\n0\tb\t\n", "1\n0\tb\n", "1\ta\n\n0\tb\tc\n"])
def test_a_row_of_other_length_than_the_head_is_refused(tmp_path: Path, rows: str) -> None:
    (tmp_path / "toy.dev.tsv").write_text("label\tsentence\n" + rows)
    with pytest.raises(ValueError, match=r"toy\.dev\.tsv line [24]: has [13] column\(s\), expected 2 between tabs"):
        read_labelled(tmp_path, "toy", "dev")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.dev.tsv.xz").write_bytes(lzma.compress(b"label\tsentence\n1\ta\n")[:-20])
    with pytest.raises(ValueError, match=r"toy\.dev\.tsv\.xz is not a whole \.xz file"):
        read_labelled(tmp_path, "toy", "dev")


def test_two_tables_of_one_split_are_refused(tmp_path: Path) -> None:
    (tmp_path / "TOY").mkdir()
    for name in ("toy.dev.tsv", "TOY/dev.tsv"):
        (tmp_path / name).write_text("label\tsentence\n1\ta\n")
    with pytest.raises(ValueError, match=r"dev of toy is there more than once: toy\.dev\.tsv, TOY/dev\.tsv"):
        read_labelled(tmp_path, "toy", "dev")
