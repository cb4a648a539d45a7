"""Text in every form that is read, what is said of text that cannot be used, and its subwords."""

import gzip
import lzma
from pathlib import Path

import pytest

from analysis.experiments.text import LabelledSentences, read_labelled, read_parallel, read_tables, train_bpe

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


def test_drops_pairs_with_an_empty_side(tmp_path):
    as_lines(tmp_path, {split: split for split in PAIRS})
    (tmp_path / "train.de").write_text("Ein Hund.\n\nDrei.\n")
    (tmp_path / "train.en").write_text("A dog.\nTwo.\n \n")
    train = read_parallel(tmp_path, "de", "en")["train"]
    assert (train.source, train.target) == (["Ein Hund."], ["A dog."])
    assert read_parallel(tmp_path, "de", "en", lowercase=True)["train"].source == ["ein hund."]


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
    with pytest.raises(ValueError, match=r"data\.prefix could be multi30k"):
        read_parallel(tmp_path, "de", "en")


def test_pieces_say_the_text_again() -> None:
    pytest.importorskip("sentencepiece")
    sentences = [
        f"{who} {what}." for who in ("der Hund", "die Katze", "Tom") for what in ("bellt", "ruft", "singt laut")
    ]
    bpe = train_bpe(sentences, 40)
    assert bpe.get_piece_size() == 40
    assert [bpe.decode(bpe.encode(sentence)) for sentence in sentences] == sentences
    with pytest.raises(ValueError, match=r"data\.vocab 90000: .* value <="):
        train_bpe(sentences, 90000)


# ---- labelled sentences -------------------------------------------------------------------------------------------


def test_reads_pairs_with_quotes_as_they_are(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "toy.dev.tsv.xz", "wt") as file:
        file.write('label\tsentence1\tsentence2\n1\tsay "NA\ta "b" \\\n')
    assert read_labelled(tmp_path, "toy", "dev") == LabelledSentences(["1"], [['say "NA'], ['a "b" \\']])


@pytest.mark.parametrize(
    ("task", "split", "head"),
    [("QNLI", "dev", "question\tsentence\tlabel"), ("MNLI", "dev_matched", "sentence1\tsentence2\tgold_label")],
)
def test_reads_glues_own_files(tmp_path: Path, task: str, split: str, head: str) -> None:
    (tmp_path / task).mkdir()
    (tmp_path / task / f"{split}.tsv").write_text(f"index\t{head}\n0\ta\tb\tyes\n")
    assert read_labelled(tmp_path, task.lower(), "dev") == LabelledSentences(["yes"], [["a"], ["b"]])


def test_line_ends_marks_and_empty_lines_of_other_systems_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "toy.dev.tsv").write_bytes("\ufefflabel\tsentence\r\n1 \ta\r\n\r\n0\tb\u2028c\rd\r\n".encode())
    assert read_labelled(tmp_path, "toy", "dev") == LabelledSentences(["1", "0"], [["a", "b\u2028c\rd"]])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("label\ttext\n1\tx\n", r"toy\.dev\.tsv.* expected .*label and sentence"),
        ("label\tsentence1\n1\tx\n", r"toy\.dev\.tsv.* expected .*label and sentence"),
        ("label\tsentence\n1\ta\t\n", r"line 2: has 3 column\(s\), expected 2 between tabs"),
        ("label\tsentence\n1\ta\n\n0\n", r"line 4: has 1 column\(s\), expected 2 between tabs"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "toy.dev.tsv").write_text(content)
    with pytest.raises(ValueError, match=named):
        read_labelled(tmp_path, "toy", "dev")


@pytest.mark.parametrize(
    ("dev", "named"),
    [
        ("label\tsentence\nsame\tx\n", "the train and the dev table of toy have other columns of sentences"),
        (
            "label\tsentence1\tsentence2\nneither\tx\ty\n",
            "the dev table of toy has labels that train has not: 'neither'",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, dev: str, named: str) -> None:
    (tmp_path / "toy.train.tsv").write_text("label\tsentence1\tsentence2\nsame\tx\ty\n")
    (tmp_path / "toy.dev.tsv").write_text(dev)
    with pytest.raises(ValueError, match=named):
        read_tables(tmp_path, "toy")
    (tmp_path / "TOY").mkdir()
    (tmp_path / "TOY" / "dev.tsv").touch()
    with pytest.raises(ValueError, match=r"dev of toy is there more than once: toy\.dev\.tsv, TOY/dev\.tsv"):
        read_tables(tmp_path, "toy")
