"""Runs an experiment, or goes on with it: finished runs are kept, a killed one resumes from its last checkpoint.

    python -m analysis.experiments.run analysis/experiments/recipes/tatoeba.toml --out runs/tatoeba --jobs 2
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --dry-run
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --only 'bfp_*_seed1'
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --set training.max-epoch=1 --set data.vocab=200

data prepared once -> runs, each a process -> ledger.csv, a row a run; then python -m analysis.experiments.report.
Several commands, on several machines that see one file system, may be at one experiment: each run is trained once.
How far a run is: tail -f NAME/RUN/train.log.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from analysis.experiments.data import prepare
from analysis.experiments.fairseq_run import environment
from analysis.experiments.ledger import FILE, add_row, place, row
from analysis.experiments.recipe import Experiment, PlannedRun, check, load_experiment, plan
from analysis.experiments.train import Training
from dsq.command import OneLineParser, count, guarded, make_folder, table

PROG = "python -m analysis.experiments.run"
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: its settings (run.json), its lock and what came out (results.json)."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run: "run", from its start, or "results", from its end; None before."""
        with contextlib.suppress(FileNotFoundError):
            content: dict[str, Any] = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
            return content
        return None

    def check(self, training: Training) -> None:
        """Raise ValueError where the folder holds a run with other settings than these."""
        found = self.read("run")
        if found is None:
            return
        settings = training.data.settings()
        found["data"] = {key: value for key, value in found["data"].items() if key in settings}
        for key, value in {"data": settings, "levels": training.levels, "flags": list(training.flags)}.items():
            if found.get(key) != value:
                raise ValueError(
                    f"{self.path}: its run was made with {key} {found.get(key)}, the recipe now says {value}: "
                    "give another --out, or remove that folder"
                )

    def start(self, training: Training, place: dict[str, str]) -> None:
        """Record the run's settings and where it is started; a resumed run may have several places."""
        places = [*(self.read("run") or {}).get("places", []), place]
        self.path.mkdir(parents=True, exist_ok=True)
        training.write(self.path, places=places)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """The descriptor of the run's lock, for its process to hold until it ends; None where another process does."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT)
        held = None
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = descriptor
            yield held
        finally:
            os.close(descriptor)

    def failure(self, status: int) -> str:
        """Why a run ended with this exit status: a signal, which leaves no word, or the last line of its log."""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


class Session:
    """One call of the command: starts the runs that are not finished, ``jobs`` at a time, and records those that end.

    The process of a run has a group of its own, and holds the run's lock.
    """

    def __init__(self, experiment: Experiment, runs: list[PlannedRun], out: Path, threads: int) -> None:
        self.experiment, self.out, self.threads = experiment, out, threads
        self.runs = {run.name: run for run in runs}
        self.folders = {run.name: RunFolder((out / run.name).resolve()) for run in runs}
        self.failed: dict[str, str] = {}
        self.elsewhere: list[str] = []

    def go(self, jobs: int) -> None:
        """Run to the end. Raises ValueError where runs failed; the others are finished then."""
        waiting = [run for run in self.runs.values() if not self._enter_finished(run)]
        print(f"{len(self.runs) - len(waiting)} of {len(self.runs)} runs were finished before", flush=True)
        active: dict[str, subprocess.Popen[bytes]] = {}
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    if process := self._start(run):
                        active[run.name] = process
                time.sleep(POLL_SECONDS)
                for name in [name for name, process in active.items() if process.poll() is not None]:
                    self._ended(self.runs[name], active.pop(name).returncode)
        finally:
            for process in active.values():
                stop(process)
        if self.elsewhere:
            print(f"another process is at {', '.join(self.elsewhere)}: call again when it has ended")
        if self.failed:
            name, why = next(iter(self.failed.items()))
            raise ValueError(f"{len(self.failed)} of {len(self.runs)} runs failed, first {name}: {why}")

    def _start(self, run: PlannedRun) -> "subprocess.Popen[bytes] | None":
        """The run's process; None where another command is at the run, or has ended it.

        Raises ValueError where another command has begun the run with other settings since this one looked.
        """
        folder = self.folders[run.name]
        training = run.training_on(self.experiment.data, self.out / "data")
        with folder.locked() as lock:
            folder.check(training)
            if lock is None:
                self.elsewhere.append(run.name)
            if lock is None or self._enter_finished(run):
                return None
            print(f"start  {run.name}", flush=True)
            folder.start(training, place("--cpu" in training.flags) | {"threads": str(self.threads)})
            with folder.log.open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "analysis.experiments.train", str(folder.path)],
                    env=environment() | {"OMP_NUM_THREADS": str(self.threads)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock,),
                )

    def _ended(self, run: PlannedRun, status: int) -> None:
        entered = None if status else self._enter_finished(run)
        if entered:
            print(f"done   {run.name}: {entered['measure']} {entered['score']}", flush=True)
        else:
            folder = self.folders[run.name]
            self.failed[run.name] = f"{folder.failure(status)} (all of it: {folder.log})"
            print(f"FAILED {run.name}: {self.failed[run.name]}", flush=True)

    def _enter_finished(self, run: PlannedRun) -> dict[str, Any] | None:
        """The run's row, which is then in the ledger; None where the run is not finished."""
        results, settings = (self.folders[run.name].read(name) for name in ("results", "run"))
        if results is None or settings is None:
            return None
        entered = row(self.experiment, run, results, settings["places"])
        add_row(self.out / FILE, entered)
        return entered


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process, and all of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGCONT)  # one that was stopped would never end
        process.wait()


def show_plan(runs: list[PlannedRun], out: Path) -> str:
    """The plan as a table: each run's updates, and whether it is finished."""
    rows = []
    for run in runs:
        updates = run.max_update or f"{run.training.get('max-epoch', 'default')} epochs"
        finished = "yes" if RunFolder(out / run.name).read("results") else "no"
        rows.append({"run": run.name, "updates": updates, "finished": finished})
    return f"{table(rows)}\n\n{len(runs)} runs"


def run_recipe(
    recipe: Path,
    out: Path,
    *,
    data: Path | None = None,
    changes: Sequence[str] = (),
    only: list[str] | None = None,
    dry_run: bool = False,
    jobs: int = 1,
    threads: int = 1,
) -> None:
    """Do the runs of ``recipe`` in ``out``. Raises ValueError for the user's mistakes.

    Args:
        data: in place of the recipe's data.path.
        changes, only: as ``load_experiment`` and ``plan`` take them.
        dry_run: print the plan, and run nothing.
        jobs: runs at a time. threads: of each run.
    """
    experiment = load_experiment(recipe, changes)
    if data:
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, path=str(data)))
    try:
        runs = plan(experiment, only)
        check(experiment, runs)
        for run in runs:
            RunFolder(out / run.name).check(run.training_on(experiment.data, out / "data"))
        if dry_run:
            print(show_plan(runs, out))
            return
        experiment.data.check_present()
    except ValueError as error:
        raise ValueError(f"{recipe}: {error}") from None
    make_folder(out)
    prepare(experiment.data, out / "data")
    signal.signal(signal.SIGTERM, _terminated)
    Session(experiment, runs, out, threads).go(jobs)
    print(f"ledger: {out / FILE}; tables: python -m analysis.experiments.report {out / FILE}")


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """The command; ``arguments``: default, those of the process."""
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of all runs and the ledger")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the data are; default: the recipe's data.path")
    change = "a value in place of the recipe's outside [[runs]], as in training.max-epoch=1; may be given again"
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="TABLE.KEY=VALUE", help=change)
    parser.add_argument("--only", action="append", metavar="GLOB", help="runs whose names match; may be given again")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and run nothing")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of a run (default: %(default)s)")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: run_recipe(**vars(given)))


if __name__ == "__main__":
    sys.exit(main())
