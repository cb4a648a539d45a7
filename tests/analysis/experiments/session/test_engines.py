"""Where runs run: a process here, or submitit's."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from analysis.experiments.session.engines import Job, LocalJob, run_here, submitit_engine
from analysis.experiments.session.run_folder import RunFolder


def ended(job: Job) -> int:
    while (status := job.status()) is None:
        time.sleep(0.02)
    return status


def test_a_local_job_has_its_environment_log_and_status(tmp_path: Path) -> None:
    log, lock = tmp_path / "log", os.open(tmp_path, os.O_RDONLY)
    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS']); raise SystemExit(3)"]
    assert ended(LocalJob(command, {"OMP_NUM_THREADS": "1"}, log, lock)) == 3
    assert log.read_text() == "1\n"
    with pytest.raises(RuntimeError, match="exit status 3; its log is"):
        run_here(command, {"OMP_NUM_THREADS": "2"}, log)
    assert log.read_text() == "1\n2\n"
    os.close(lock)


def test_stopping_ends_what_the_job_started(tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    job = LocalJob(["sh", "-c", "sleep 60 & wait"], {}, tmp_path / "log", lock)
    job.stop()
    assert job.status() not in (None, 0)
    os.close(lock)


def test_stopping_ends_a_job_that_is_suspended(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        job = LocalJob(["sleep", "60"], {}, tmp_path / "log", lock.fileno())
    os.killpg(job._process.pid, signal.SIGSTOP)
    job.stop()
    assert job.status() == -signal.SIGTERM


def test_submitit_is_asked_for_where_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match="submitit is not installed here: pip install submitit"):
        submitit_engine(tmp_path, {})


def test_submitit_runs_a_job(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    engine = submitit_engine(tmp_path / "jobs", {"timeout_min": "1"})
    job = engine([sys.executable, "-c", "print('here')"], {}, tmp_path / "log", 0)
    assert ended(job) == 0
    assert (tmp_path / "log").read_text() == "here\n"


def test_a_killed_run_does_not_blame_the_last_line_of_its_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log.write_text("update 3\n")
    assert folder.failure(-9) == "killed by SIGKILL"
    assert folder.failure(1) == "update 3"
