"""The data that an experiment's runs share."""

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
