"""The GLUE recipe on tiny tables."""

import lzma
import random
from pathlib import Path

import pytest

from analysis.experiments import glue
from analysis.experiments.labelled import LabelledSentences, read_labelled


def write_table(path: Path, rows: list[tuple[str, ...]]) -> None:
    text = "\n".join("\t".join(row) for row in rows) + "\n"
    with lzma.open(path, "wt") if path.suffix == ".xz" else path.open("w") as file:
        file.write(text)


def pairs(count: int, seed: int) -> list[tuple[str, ...]]:
    """Pairs of sentences that say the same or not."""
    draw, rows = random.Random(seed), [("label", "sentence1", "sentence2")]
    for _ in range(count):
        who, what, other = draw.choice(["hund", "katze"]), *draw.sample(["frisst", "schläft", 'sagt "ja'], 2)
        same = draw.random() < 0.5
        rows.append(("same" if same else "other", f"der {who} {what}", f"es {what if same else other} der {who}"))
    return rows


def test_reads_pairs_with_quotes_as_they_are(tmp_path: Path) -> None:
    write_table(tmp_path / "toy.dev.tsv.xz", [("label", "sentence1", "sentence2"), ("1", 'say "NA', 'a "b" \\')])
    table = read_labelled(tmp_path, "toy", "dev")
    assert table == LabelledSentences(["1"], [['say "NA'], ['a "b" \\']])


@pytest.mark.parametrize("header", [("label", "text"), ("sentence", "text"), ("label", "sentence1")])
def test_other_columns_are_refused(tmp_path: Path, header: tuple[str, ...]) -> None:
    write_table(tmp_path / "toy.dev.tsv", [header, ("1", "x")])
    with pytest.raises(ValueError, match=r"toy\.dev\.tsv.* expected .*label and sentence"):
        read_labelled(tmp_path, "toy", "dev")


def test_a_missing_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert glue.main(["--data", str(tmp_path), "--task", "toy", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m analysis.experiments.glue: error: --data {tmp_path}: no toy.train.tsv")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dsq-levels", "x"], "argument --dsq-levels: "),
        (["--nosuchflag", "3"], "unrecognized arguments: --nosuchflag 3"),
        (["--num-classes", "3"], "--num-classes: the recipe relies on its own choice"),
        (["--vocab", "0"], "--vocab 0: "),
    ],
)
def test_a_bad_flag_leaves_nothing_that_stops_the_next_try(
    tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], named: str
) -> None:
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    for split in ("train", "dev"):
        write_table(tmp_path / f"toy.{split}.tsv", pairs(16, 0))
    out = tmp_path / "run"
    assert glue.main(["--data", str(tmp_path), "--task", "toy", "--out", str(out), *flags]) == 2
    said = capsys.readouterr().err
    assert f"python -m analysis.experiments.glue: error: {named}" in said
    assert said.count("\n") == 1
    assert not out.exists() or not any(out.iterdir())


def test_the_recipe_trains_on_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    write_table(tmp_path / "toy.train.tsv", pairs(64, 0))
    write_table(tmp_path / "toy.dev.tsv", pairs(16, 1))
    small = ["--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32", "--max-epoch", "1", "--batch-size", "16"]
    given = ["--data", tmp_path, "--task", "toy", "--out", tmp_path / "run", "--vocab", 40, *small, "--cpu"]
    assert glue.main([str(word) for word in given]) == 0
    assert "[4, 4, 4, 16]: 4 updates" in capsys.readouterr().out
