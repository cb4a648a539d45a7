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


def test_reads_glue_as_it_unpacks(tmp_path: Path) -> None:
    for task in ("MNLI", "QNLI"):
        (tmp_path / task).mkdir()
    (tmp_path / "MNLI" / "dev_matched.tsv").write_text(
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tx\ty\n"
    )
    (tmp_path / "QNLI" / "train.tsv").write_text("index\tquestion\tsentence\tlabel\n0\twho\thim\tentailment\n")
    assert read_labelled(tmp_path, "mnli", "dev").inputs == [["a"], ["b"]]
    assert read_labelled(tmp_path, "mnli", "dev").labels == ["y"]
    assert read_labelled(tmp_path, "qnli", "train").inputs == [["who"], ["him"]]
