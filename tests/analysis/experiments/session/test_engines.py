"""Where runs run: a process here, or submitit's."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from analysis.experiments.plan.experiment import Data
from analysis.experiments.plan.runs import PlannedRun
from analysis.experiments.session.engines import ELSEWHERE, Job, LocalJob, RunCommand, run_here, submitit_engine
from analysis.experiments.session.run_folder import RunFolder

#: says so in its folder, and waits for a file there
WAITS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "started").open("a") as file:
    file.write("x")
while not (folder / "end").exists():
    time.sleep(0.02)
"""


def work(folder: Path, *command: str, **environment: str) -> RunCommand:
    run = PlannedRun("x", "", None, {"levels": "none"}, 1, {})
    return RunCommand(run, Data("generated"), RunFolder(folder / "x"), command, environment)


def python(text: str, *arguments: Path) -> list[str]:
    return [sys.executable, "-c", text, *map(str, arguments)]


def ended(job: Job) -> int:
    while (status := job.status()) is None:
        time.sleep(0.02)
    return status


def appears(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_a_local_job_has_its_environment_log_and_status(tmp_path: Path) -> None:
    given = python("import os; print(os.environ['OMP_NUM_THREADS']); raise SystemExit(3)")
    assert ended(LocalJob(one := work(tmp_path, *given, OMP_NUM_THREADS="1"))) == 3
    assert one.folder.log.read_text() == "1\n"
    assert run_here(work(tmp_path, *given, OMP_NUM_THREADS="2")) == 3
    assert one.folder.log.read_text() == "1\n2\n"
    assert [place["threads"] for place in one.folder.settings["places"]] == ["1", "2"]


def test_a_run_that_another_process_is_at_or_has_ended_is_left_alone(tmp_path: Path) -> None:
    one = work(tmp_path, "false")
    with one.folder.locked():
        assert LocalJob(one).status() == run_here(one) == ELSEWHERE
    (one.folder.path / "results.json").write_text('{"bleu": 1}')
    assert LocalJob(one).status() == run_here(one) == 0
    assert not one.folder.log.exists()
    with pytest.raises(BlockingIOError), one.folder.locked():
        raise BlockingIOError  # as where no process can be started


def test_a_run_that_another_command_began_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    one = work(tmp_path, "false")
    one.folder.start(dataclasses.replace(one.run, training={"max-update": 9}), one.data, {})
    (one.folder.path / "results.json").write_text('{"bleu": 1}')
    with pytest.raises(ValueError, match=r"its run was made with training {'max-update': 9}, the recipe now says {}"):
        LocalJob(one)


def test_stopping_ends_what_the_job_started(tmp_path: Path) -> None:
    job = LocalJob(work(tmp_path, "sh", "-c", "sleep 60 & wait"))
    job.stop()
    assert job.status() not in (None, 0)


def test_stopping_ends_a_job_that_is_suspended(tmp_path: Path) -> None:
    job = LocalJob(work(tmp_path, "sleep", "60"))
    os.killpg(job._process.pid, signal.SIGSTOP)
    job.stop()
    assert job.status() == -signal.SIGTERM


def test_submitit_is_asked_for_where_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r'submitit is not installed here: pip install "dsq-torch\[cluster\]"'):
        submitit_engine(tmp_path, {})


@pytest.mark.parametrize("parameters", [{"queue": "gpu"}, {"timeout_min": "long"}])
def test_what_submitit_does_not_take_is_a_mistake_of_the_users(tmp_path: Path, parameters: dict[str, str]) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(ValueError, match=f"--submitit: .*{min(parameters)}"):
        submitit_engine(tmp_path, parameters)


def test_of_two_commands_with_submitit_one_trains_a_run(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    engine = submitit_engine(tmp_path / "jobs", {"timeout_min": "2"})
    jobs = [engine(work(tmp_path, *python(WAITS, tmp_path))) for _ in range(2)]
    while not any(job.status() == ELSEWHERE for job in jobs):
        time.sleep(0.02)
    (tmp_path / "end").touch()
    assert sorted(map(ended, jobs)) == [0, ELSEWHERE]
    assert (tmp_path / "started").read_text() == "x"


def test_stopping_a_job_of_submitit_ends_the_training(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    one = work(tmp_path, *python(WAITS, tmp_path))
    job = submitit_engine(tmp_path / "jobs", {"timeout_min": "2"})(one)
    appears(tmp_path / "started")
    job.stop()
    assert ended(job) == 1
    with one.folder.locked() as lock:
        assert lock is not None


def test_a_killed_run_does_not_blame_the_last_line_of_its_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log.write_text("update 3\n")
    assert folder.failure(-9) == "killed by SIGKILL"
    assert folder.failure(1) == "update 3"
