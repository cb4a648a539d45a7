"""The data that an experiment's runs share."""

import lzma
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments import translate
from analysis.experiments.plan.experiment import Data
from analysis.experiments.session import data_folder


def test_commands_that_share_a_folder_prepare_it_one_after_the_other(tmp_path: Path, monkeypatch) -> None:
    """Threads here, whose locks differ as processes' do."""
    seen = []

    def prepare(translation) -> None:
        seen.append("begin")
        time.sleep(0.05)
        seen.append("end")

    monkeypatch.setattr(translate, "prepare", prepare)
    data = Data("generated", sentences=2, held_out=1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: data_folder.prepare(data, tmp_path / "data"), range(2)))
    assert seen == ["begin", "end"] * 2


def test_text_may_move_and_be_packed_but_not_change(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(translate, "_binarise", lambda *_: None)
    first, second = tmp_path / "first", tmp_path / "second"
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            for folder, name in ((first, f"{split}.{language}"), (second, f"{split}.{language}.xz")):
                folder.mkdir(exist_ok=True)
                (folder / name).write_bytes(lzma.compress(b"ja\nnein\n") if name.endswith("xz") else b"ja\nnein\n")
    data_folder.prepare(Data("parallel", path=str(first)), tmp_path / "data")
    data_folder.prepare(Data("parallel", path=str(second)), tmp_path / "data")
    (first / "test.en").write_text("ja\nno\n")
    with pytest.raises(ValueError, match="was made of other text than --data has now: put that back, or give another"):
        data_folder.prepare(Data("parallel", path=str(first)), tmp_path / "data")


def test_what_a_killed_preparation_left_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / "binary" / "test.de-en.en.idx"
    left.parent.mkdir()
    left.touch()
    (tmp_path / "text.sha256").write_text("of text that was mended\n")
    binarised = []
    monkeypatch.setattr(translate, "_binarise", lambda *_: binarised.append(left.exists()))
    data_folder.prepare(Data("generated", sentences=2, held_out=1), tmp_path)
    assert binarised == [False]


def test_tables_of_fine_tuning_may_not_change_either(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"toy.{split}.tsv").write_text("label\tsentence\n1\tgut\n0\tschlecht\n")
    data = Data("finetuning", path=str(tmp_path), task="toy", pretrained=str(tmp_path))
    data_folder.prepare(data, tmp_path / "data")
    data_folder.prepare(data, tmp_path / "data")
    (tmp_path / "toy.dev.tsv").write_text("label\tsentence\n0\tgut\n")
    with pytest.raises(ValueError, match="was made of other text"):
        data_folder.prepare(data, tmp_path / "data")
