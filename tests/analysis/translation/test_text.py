"""Files of sentences in every form that is read, what is said of those that cannot be used, and subwords."""

import lzma
from pathlib import Path

import pytest

from analysis.translation.text import LabeledSentences, read_labeled, read_pairs, train_bpe

LINES = "Ein Hund.\tA dog.\nZwei.\t \n\nDrei.\tThree.\tmore\n"


@pytest.mark.parametrize(("ending", "opener"), [("", open), (".xz", lzma.open)])
def test_pairs_are_the_first_two_columns_where_both_say_something(tmp_path: Path, ending: str, opener) -> None:
    path = tmp_path / f"train.tsv{ending}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(LINES)
    assert read_pairs(path) == [("Ein Hund.", "A dog."), ("Drei.", "Three.")]


def test_a_cut_has_every_nth_line(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("".join(f"{n}\t{n}\n" for n in range(10)))
    assert [pair[0] for pair in read_pairs(path, 4)] == ["0", "2", "4", "6"]
    assert len(read_pairs(path, 20)) == 10


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.tsv", b"\xff\xfe\xfa\n", "a.tsv is not UTF-8"),
        ("a.tsv", b"\n \t \n", "a.tsv holds no sentence pair"),
        ("a.tsv", b"Vier.\tFour.\nonly\n", "a.tsv line 2 has 1 column; expected 2"),
        ("a.xz", lzma.compress(b"Vier.\tFour.\n" * 99)[:-20], "a.xz is not a whole .xz file"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"--data: {words}"):
        read_pairs(tmp_path / name)


def test_pieces_say_the_text_again() -> None:
    pytest.importorskip("sentencepiece")
    sentences = [
        f"{who} {verb}." for who in ("der Hund", "die Katze", "Tom") for verb in ("bellt", "ruft", "singt laut")
    ]
    bpe = train_bpe(sentences, 40)
    assert bpe.get_piece_size() == 40
    assert [bpe.decode(bpe.encode(sentence)) for sentence in sentences] == sentences
    with pytest.raises(ValueError, match=r"vocab 90000: .* value <="):
        train_bpe(sentences, 90000)


def test_reads_labeled_pairs_with_quotes_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "toy.dev.tsv.xz"
    path.write_bytes(lzma.compress(b'label\tsentence1\tsentence2\n1\tsay "NA\ta "b" \\\n'))
    assert read_labeled(path) == LabeledSentences(["1"], [['say "NA'], ['a "b" \\']])


def test_line_ends_marks_and_empty_lines_of_other_systems_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "toy.dev.tsv"
    path.write_bytes("\ufefflabel\tsentence\r\n1 \ta\r\n\r\n0\tb\u2028c\rd\r\n".encode())
    assert read_labeled(path) == LabeledSentences(["1", "0"], [["a", "b\u2028c\rd"]])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("label\ttext\n1\tx\n", "expected columns label and sentence"),
        ("label\tsentence1\n1\tx\n", "expected columns label and sentence"),
        ("label\tsentence\n", "has 0 rows of"),
        ("label\tsentence\n1\ta\t\n", "line 2 has 3 columns; expected 2"),
        ("label\tsentence\n1\ta\n\n0\n", "line 4 has 1 columns; expected 2"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "toy.tsv").write_text(content)
    with pytest.raises(ValueError, match=rf"--data: toy\.tsv .*{named}"):
        read_labeled(tmp_path / "toy.tsv")
