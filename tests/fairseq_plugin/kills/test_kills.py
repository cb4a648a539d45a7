"""A run killed at any moment, or at any of its file operations, goes on and ends with the bits of an unbroken one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fairseq_plugin.harness import start

HERE = Path(__file__).parent


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """killer.c, compiled."""
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("killing at a file operation takes Linux and a C compiler")
    made = tmp_path / "killer.so"
    subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-o", made, HERE / "killer.c"], check=True)
    return made


@pytest.mark.parametrize(
    ("first", "kills"), [(7, 1), *(pytest.param(first, 5, marks=pytest.mark.soak) for first in range(0, 20, 5))]
)
def test_killed_runs_end_as_an_unbroken_one(data: Path, tmp_path: Path, library: Path, first: int, kills: int) -> None:
    arguments = ["-m", "tests.fairseq_plugin.kills.killed_runs", data, tmp_path, first, kills]
    process = start(*arguments, LD_PRELOAD=str(library))
    said = process.communicate()[0]
    assert process.returncode == 0, said
    outcome = json.loads(said.splitlines()[-1])
    assert (outcome["killed"], outcome["failed"]) == ({"operation": kills, "moment": kills}, {}), outcome
    assert outcome["operations"] > 50  # that so many were seen shows that they are counted
