"""Every case of cases.yaml: exit status 2 and one line, or one ValueError or TypeError; never a traceback."""

import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import dsq
from dsq import costmodel
from tests.bad_input import fuzz
from tests.threads import threads

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
EXPRESSIONS = CASES.pop("python")
COMMANDS = [(program, case, line) for program, cases in CASES.items() for case, line in cases.items()]
MODULES = {"dsq-cost": "dsq.costmodel"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of no use, and damaged files."""
    folder = tmp_path_factory.mktemp("place")
    contents = {"file": b"hello\n", "junk.pt": b"hello\n"}
    contents |= {"file.toml": b"= [\n", "list.json": b"[]", "empty.json": b"{}"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "data").mkdir()
    return folder


@pytest.fixture(scope="module")
def place(files: Path) -> Path:
    """Texts, data, a checkpoint and a damaged one besides."""
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    from tests.fairseq_plugin.harness import LEVELS, MODEL, run, sentence_pairs, write_pairs

    with contextlib.chdir(files):
        Path("text").mkdir()
        for seed, name in enumerate(("train", "valid", "test")):
            write_pairs(Path("text", name), sentence_pairs(40, seed))
        prefixes = [f"--{name}pref=text/{name}" for name in ("train", "valid", "test")]
        run("preprocess", "-s", "de", "-t", "xx", *prefixes, "--destdir", "data")
        run("train", "data", *MODEL, "--max-update", 1, "--save-dir", "run", "--dsq-levels", LEVELS)
        whole = Path("run", "checkpoint_last.pt").read_bytes()
        Path("damaged.pt").write_bytes(whole[:3000] + bytes(100) + whole[3100:])
    return files


@pytest.fixture
def fresh(place: Path) -> Iterator[None]:
    """A command meets nothing that the one before it left, in the process or on the disk."""
    from fairseq import checkpoint_utils

    yield
    for memory in ("best", "num_runs"):
        vars(checkpoint_utils.save_checkpoint).pop(memory, None)
    shutil.rmtree(place / "out", ignore_errors=True)


@pytest.mark.parametrize(("program", "case", "line"), COMMANDS)
def test_command(
    files: Path, program: str, case: str, line: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    words = shlex.split(f"{program} {case}")
    if words[0] != "dsq-cost":
        request.getfixturevalue("fresh")
        from tests.fairseq_plugin.harness import MODEL

        words = [word for text in words for word in (MODEL if text == "$MODEL" else [text])]
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    elif words[0] != "dsq-cost":
        words[:1] = ["fairseq_plugin.commands", words[0].removeprefix("dsq-")]
    module = MODULES.get(words[0], words[0])
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "argv", words)
    output = io.StringIO()
    with (
        contextlib.redirect_stderr(output),
        contextlib.redirect_stdout(io.StringIO()),
        threads(1),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with pytest.raises(SystemExit) as exit_:
            runpy.run_module(module, run_name="__main__")
    lines = [text for text in output.getvalue().splitlines() if text.strip() and " | INFO | " not in text]
    assert exit_.value.code == 2
    assert len(lines) == 1
    left = [path.name for path in Path("out").rglob("*") if path.is_file() and path.suffix != ".log"]
    assert set(left) <= {".turn"}  # by which processes take turns
    assert re.sub(r"^.*?: error: ", "", lines[0]).startswith(line)


def test_some_files_of_odd_values(tmp_path: Path) -> None:
    """Many more: .ci/fuzz."""
    faults = []
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        faults.append(fuzz.case(number, tmp_path / str(number)))
    assert list(filter(None, faults)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("expression", "line"), EXPRESSIONS.items())
def test_expression(expression: str, line: str) -> None:
    names = {"torch": torch, "dsq": dsq, "costmodel": costmodel, "x": torch.ones(4, 16)}
    names["model"] = torch.nn.Sequential(torch.nn.Linear(16, 4))
    with pytest.raises((ValueError, TypeError)) as raised:
        eval(expression, names)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
