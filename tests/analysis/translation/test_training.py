"""What is prepared and read around fairseq's commands, and what is said where one fails."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.translation import demo, training
from analysis.translation.training import Text, Trained, fairseq, hypotheses, prepare, valid_losses
from tests.fairseq_plugin.harness import sentence_pairs


@pytest.fixture
def text() -> Text:
    sizes = {"train": 60, "valid": 6, "test": 6}
    return Text({split: sentence_pairs(n, seed) for seed, (split, n) in enumerate(sizes.items())}, "de", "xx", 60)


def test_text_is_prepared_once_and_anew_where_it_differs(text: Text, tmp_path: Path, monkeypatch) -> None:
    seen: list[Text] = []
    monkeypatch.setattr(training, "_binarize", lambda text, folder: seen.append(text))
    other = dataclasses.replace(text, vocab=61)
    swapped = dataclasses.replace(text, pairs={**text.pairs, "test": text.pairs["valid"]})
    folders = [prepare(one, tmp_path) for one in (text, text, other, swapped)]
    assert seen == [text, other, swapped]
    assert len(set(folders)) == 3


def test_what_a_killed_preparation_left_is_not_taken(text: Text, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "_binarize", lambda *_: None)
    left = tmp_path / text.digest / "binary" / "test.de-xx.de.idx"
    left.parent.mkdir(parents=True)
    left.touch()
    prepare(text, tmp_path)
    assert not left.exists()


@pytest.mark.parametrize(("status", "error"), [(2, ValueError), (1, RuntimeError)])
def test_the_last_line_is_what_went_wrong(tmp_path: Path, monkeypatch, status: int, error: type[Exception]) -> None:
    (tmp_path / "fairseq_plugin").mkdir()
    (tmp_path / "fairseq_plugin" / "__init__.py").touch()
    (tmp_path / "fairseq_plugin" / "commands.py").write_text(f"print('one\\ntwo'); raise SystemExit({status})")
    monkeypatch.chdir(tmp_path)  # python -m looks here first
    named = "^two$" if status == 2 else "^dsq-train failed with exit status 1: two$"
    with pytest.raises(error, match=named):
        fairseq("train", [], tmp_path / "log")


def test_logs_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("S-1\tx\nD-1\t-0.1\ttwo words\nH-0\t-1\tno\nD-0\t-0.2\tone\nD-10\t-0.2\tten\n")
    assert hypotheses(log) == ["one", "two words", "ten"]
    log.write_text(
        '12:00 | INFO | valid | {"valid_loss": "2.5", "valid_num_updates": "9"}\n12:01 | INFO | train | {}\n'
    )
    assert valid_losses(log) == [(9, 2.5)]


def test_the_demos_picture_is_drawn(tmp_path: Path) -> None:
    plain = Trained([(1, 5.0), (2, 4.0)], 1.0, 28.1, [], Path())
    demo.draw({"fp32": plain, "DSQ": plain}, {"fp32": 9.0, "DSQ": 2.0}, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
