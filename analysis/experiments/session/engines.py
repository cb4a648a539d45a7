"""Where the processes of runs run: on this machine, or by submitit on a cluster (Slurm)."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from analysis import ROOT


class Job(Protocol):
    """A run's process."""

    def status(self) -> int | None:
        """Its exit status; None while it runs."""

    def stop(self) -> None:
        """End it and what it started."""


#: (command, further environment, log, descriptor of the run's lock) -> what was started
Engine = Callable[[Sequence[str], Mapping[str, str], Path, int], Job]


class LocalJob:
    """An Engine: a process of this machine, in a group of its own. It holds ``lock`` open until it ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, lock: int) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )

    def status(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            os.killpg(self._process.pid, signal.SIGCONT)  # one that was stopped would never end
            self._process.wait()


class SubmititJob:
    """A job of submitit's; the folder of experiments has to be on a file system that all machines see."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def status(self) -> int | None:
        return None if not self._job.done() else 1 if self._job.exception() else 0

    def stop(self) -> None:
        self._job.cancel()


def submitit_engine(folder: Path, parameters: Mapping[str, str]) -> Engine:
    """submitit's AutoExecutor: Slurm where there is one. Raises ValueError where submitit is not installed."""
    try:
        import submitit  # type: ignore[import-not-found]
    except ImportError:
        raise ValueError("--engine submitit: submitit is not installed here: pip install submitit") from None
    executor = submitit.AutoExecutor(folder=folder)
    numbers = {name: int(value) if value.isdecimal() else value for name, value in parameters.items()}
    executor.update_parameters(**{"timeout_min": 24 * 60, **numbers})
    return lambda command, environment, log, _: SubmititJob(executor.submit(run_here, command, environment, log))


def run_here(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run the command to its end on the machine that this is called on. Raises RuntimeError where it fails."""
    with log.open("ab") as file:
        done = subprocess.run(
            command, env={**os.environ, **environment}, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}; its log is {log}")
