"""The process of a fairseq command, beside one that stands in for it."""

import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis import ROOT
from analysis.experiments.fairseq_run import fairseq

#: dsq-train, as it is found in the folder that it is started from
COMMAND = """
import pathlib, sys, time
print("one", flush=True)
while not pathlib.Path("go on").exists():
    time.sleep(0.02)
print("two\\nthree", end="")
raise SystemExit(int(sys.argv[2]))
"""
CALL = """
import pathlib, sys
from analysis.experiments.fairseq_run import fairseq
fairseq("train", ["0"], pathlib.Path("log"))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fairseq_plugin").mkdir()
    (tmp_path / "fairseq_plugin" / "__init__.py").touch()
    (tmp_path / "fairseq_plugin" / "commands.py").write_text(COMMAND)
    (tmp_path / "log").write_text("of a session before\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.parametrize(("status", "error"), [(0, None), (2, ValueError), (1, RuntimeError)])
def test_lines_are_watched_and_the_last_is_what_the_user_got_wrong(folder: Path, status: int, error) -> None:
    (folder / "go on").touch()
    watched: list[str] = []
    if error is None:
        fairseq("train", [str(status)], folder / "log", watched.append)
    else:
        with pytest.raises(
            error, match="^three$" if status == 2 else "dsq-train failed with exit status 1; its log is"
        ):
            fairseq("train", [str(status)], folder / "log", watched.append)
    assert watched == ["one", "two", "three"]
    assert (folder / "log").read_text() == "of a session before\none\ntwo\nthree"


def test_a_training_outlives_a_kill_with_its_log_and_the_lock(folder: Path) -> None:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        caller = subprocess.Popen([sys.executable, "-c", CALL], pass_fds=(lock.fileno(),))
    while "one" not in (folder / "log").read_text():
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    with (folder / "lock").open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "go on").touch()
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the training has ended
    assert (folder / "log").read_text() == "of a session before\none\ntwo\nthree"
