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
