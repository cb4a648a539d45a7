import logging
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import dsq.linear

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from tests.fairseq_plugin.harness import LEVELS, MODEL, run, sentence_pairs, write_pairs
from tests.threads import threads


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binary data of the tiny corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (name, count) in enumerate({"train": 300, "valid": 40, "test": 20}.items()):
        write_pairs(folder / name, sentence_pairs(count, seed))
    prefixes = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    run("preprocess", "-s", "de", "-t", "xx", *prefixes, "--destdir", folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its log and a checkpoint after each of three updates, which no test changes. Its loss cannot improve
    (--lr 0): the level rises at the second validation."""
    folder = tmp_path_factory.mktemp("run")
    log = logging.StreamHandler(stream := open(folder / "log", "w"))  # noqa: SIM115 - closed below
    root = logging.getLogger()
    level = root.level
    root.addHandler(log)
    root.setLevel(logging.INFO)  # fairseq sets it at import, unless pytest's own handlers came first
    every = ["--save-interval-updates", 1, "--max-update", 3, "--valid-subset", "valid,test"]
    run("train", data, *MODEL, "--lr", 0, *every, "--save-dir", folder, "--dsq-levels", LEVELS, "--dsq-patience", 1)
    root.removeHandler(log)
    root.setLevel(level)
    stream.close()
    return folder


class Call(NamedTuple):
    """One call of the quantized op."""

    dtype: torch.dtype  #: of x
    weight: torch.Tensor
    quantizers: dsq.Quantizers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the quantized op, as they come."""
    seen: list[Call] = []
    op = dsq.linear.linear
    monkeypatch.setattr(dsq.linear, "linear", lambda x, w, b, q: seen.append(Call(x.dtype, w, q)) or op(x, w, b, q))
    return seen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:  # what fairseq, hydra and torch say to each other
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield
