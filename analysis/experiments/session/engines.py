"""Where the processes of runs run: on this machine, or by submitit on a cluster (Slurm).

A run's lock is taken on the machine that the run runs on, and held by its process: two commands never train one run.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from analysis import ROOT
from analysis.experiments.ledger.ledger import place
from analysis.experiments.plan.experiment import Data
from analysis.experiments.plan.runs import PlannedRun
from analysis.experiments.session.run_folder import RunFolder

#: the status of a job that found another process at its run
ELSEWHERE = os.EX_TEMPFAIL


@dataclass(frozen=True)
class RunCommand:
    """A run and the command that trains it, or goes on with it."""

    run: PlannedRun
    data: Data
    folder: RunFolder
    command: Sequence[str]
    environment: Mapping[str, str]


class Job(Protocol):
    """What runs a RunCommand, or did."""

    def status(self) -> int | None:
        """The exit status of its process, or ELSEWHERE; None before."""

    def stop(self) -> None:
        """End it and what it started."""


Engine = Callable[[RunCommand], Job]


class LocalJob:
    """An Engine: a process of this machine, in a group of its own.

    Raises ValueError where another command has begun the run with other settings since this one looked.
    """

    def __init__(self, given: RunCommand) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        with given.folder.locked() as lock:
            given.folder.check(given.run, given.data)
            if lock is None or given.folder.results:  # another command may have finished it meanwhile
                self._status = ELSEWHERE if lock is None else 0
                return
            threads = {"threads": given.environment.get("OMP_NUM_THREADS", "")}
            given.folder.start(given.run, given.data, place(given.run, given.data) | threads)
            with given.folder.log.open("ab") as log:
                self._process = subprocess.Popen(
                    given.command,
                    env={**os.environ, **given.environment},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock,),
                )

    def status(self) -> int | None:
        return self._process.poll() if self._process else self._status

    def wait(self) -> int | None:
        return self._process.wait() if self._process else self._status

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            os.killpg(self._process.pid, signal.SIGCONT)  # one that was stopped would never end
            self._process.wait()


class SubmititJob:
    def __init__(self, job: Any) -> None:
        self._job = job

    def status(self) -> int | None:
        return None if not self._job.done() else 1 if self._job.exception() else self._job.result()

    def stop(self) -> None:
        self._job.cancel()


def submitit_engine(folder: Path, parameters: Mapping[str, str]) -> Engine:
    """submitit's AutoExecutor: Slurm where there is one. Raises ValueError where submitit is not installed, or does not
    take the parameters.

    The folder of experiments has to be on a file system that all machines see, and whose locks they share.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            '--engine submitit: submitit is not installed here: pip install "dsq-torch[cluster]"'
        ) from None
    executor = submitit.AutoExecutor(folder=folder)
    numbers = {name: int(value) if value.isdecimal() else value for name, value in parameters.items()}
    try:
        executor.update_parameters(**{"timeout_min": 24 * 60, **numbers})
    except (NameError, AssertionError) as error:  # its own, for a name and a type that it does not take
        raise ValueError(f"--submitit: {str(error).splitlines()[0]}") from None
    return lambda given: SubmititJob(executor.submit(run_here, given))


def run_here(given: RunCommand) -> int | None:
    """Run the command to its end on the machine that this is called on; its exit status, or ELSEWHERE."""
    job = LocalJob(given)
    try:
        return job.wait()
    finally:
        job.stop()
