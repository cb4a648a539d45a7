"""The GLUE recipe on tiny tables."""

import random
from pathlib import Path

import pytest

from analysis.experiments import glue
from analysis.experiments.text.labelled import LabelledSentences


def write_table(path: Path, rows: list[tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def pairs(count: int, seed: int) -> list[tuple[str, ...]]:
    """Pairs of sentences that say the same or not."""
    draw, rows = random.Random(seed), [("label", "sentence1", "sentence2")]
    for _ in range(count):
        who, what, other = draw.choice(["hund", "katze"]), *draw.sample(["frisst", "schläft", 'sagt "ja'], 2)
        same = draw.random() < 0.5
        rows.append(("same" if same else "other", f"der {who} {what}", f"es {what if same else other} der {who}"))
    return rows


def test_the_recipe_trains_on_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    write_table(tmp_path / "toy.train.tsv", pairs(64, 0))
    write_table(tmp_path / "toy.dev.tsv", pairs(16, 1))
    small = ["--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32", "--max-epoch", "1", "--batch-size", "16"]
    given = ["--data", tmp_path, "--task", "toy", "--out", tmp_path / "run", "--vocab", 40, *small, "--cpu"]
    assert glue.main([str(word) for word in given]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["[4,4,4,8]", "4"]


@pytest.mark.parametrize(
    ("dev", "named"),
    [
        ([("label", "sentence"), ("same", "x")], "the train and the dev table of toy have other columns of sentences"),
        ([*pairs(4, 1), ("neither", "x", "y")], "the dev table of toy has labels that train has not: 'neither'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(dev: list[tuple[str, ...]], named: str, tmp_path: Path) -> None:
    write_table(tmp_path / "toy.train.tsv", pairs(8, 0))
    write_table(tmp_path / "toy.dev.tsv", dev)
    with pytest.raises(ValueError, match=named):
        glue.read_tables(tmp_path, "toy")


def test_a_label_of_two_words_is_refused(tmp_path: Path) -> None:
    table = LabelledSentences(["same", "not same"], [["x", "y"]])
    with pytest.raises(ValueError, match="a label must be one word, got 'not same'"):
        glue.prepare({"train": table, "valid": table}, 40, tmp_path)
