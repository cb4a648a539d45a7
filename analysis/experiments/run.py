"""Runs an experiment, or goes on with it: finished runs are kept, a killed one resumes from its last checkpoint.

    python -m analysis.experiments.run analysis/experiments/recipes/demo_formats.toml --out runs/formats --jobs 2
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --dry-run
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --only 'bfp_*_seed1'
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --set training.max-epoch=1 --set data.vocab=200
    python -m analysis.experiments.run RECIPE.toml --out runs/NAME --engine submitit --submitit slurm_partition=gpu

data prepared once -> runs, each a process -> ledger.csv, a row a run; then python -m analysis.experiments.report
"""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from analysis.experiments.ledger.ledger import FILE, add_row, read_ledger, row
from analysis.experiments.plan.costs import expected
from analysis.experiments.plan.experiment import Experiment, load_experiment
from analysis.experiments.plan.runs import PlannedRun, check, plan
from analysis.experiments.session import data_folder
from analysis.experiments.session.engines import ELSEWHERE, Engine, Job, LocalJob, RunCommand, submitit_engine
from analysis.experiments.session.run_folder import RunFolder
from costmodel.paper.run_cost import Cost
from dsq.command.files import make_folder
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import table

PROG = "python -m analysis.experiments.run"
POLL_SECONDS, PROGRESS_SECONDS = 1.0, 60.0


@dataclass(frozen=True)
class StartedRun:
    run: PlannedRun
    folder: RunFolder
    job: Job


class Session:
    """One call of the command: starts the runs that are not finished, `jobs` at a time, and records those that end."""

    def __init__(self, experiment: Experiment, runs: list[PlannedRun], out: Path, engine: Engine, threads: int) -> None:
        self.experiment, self.out, self.engine = experiment, out, engine
        self.environment = {"OMP_NUM_THREADS": str(threads)}
        self.runs = {run.name: run for run in runs}
        self.folders = {run.name: RunFolder((out / run.name).resolve()) for run in runs}
        self.failed: dict[str, str] = {}
        self.elsewhere: list[str] = []
        self._started = time.monotonic()
        self._done_before = self._done()

    def go(self, jobs: int) -> None:
        """Run to the end. Raises ValueError where runs failed; the others are finished then."""
        waiting = [run for run in self.runs.values() if not self._enter_finished(run)]
        print(f"{len(self.runs) - len(waiting)} of {len(self.runs)} runs were finished before", flush=True)
        active: list[StartedRun] = []
        printed = time.monotonic()
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    active.append(self._start(waiting.pop(0)))
                time.sleep(POLL_SECONDS)
                active = [one for one in active if not self._ended(one)]
                if time.monotonic() - printed > PROGRESS_SECONDS:
                    printed = time.monotonic()
                    self._print_progress(active)
        finally:
            for one in active:
                one.job.stop()
        if self.elsewhere:
            print(f"another process is at {', '.join(self.elsewhere)}: call again when it has ended")
        if self.failed:
            name, why = next(iter(self.failed.items()))
            raise ValueError(f"{len(self.failed)} of {len(self.runs)} runs failed, first {name}: {why}")

    def _start(self, run: PlannedRun) -> StartedRun:
        folder = self.folders[run.name]
        module, *given = data_folder.arguments(self.experiment.data, self.out / "data")
        command = [sys.executable, "-m", module, *given, "--out", str(folder.path)]
        command += ["--dsq-levels", run.levels, *run.flags]
        print(f"start  {run.name}", flush=True)
        return StartedRun(
            run, folder, self.engine(RunCommand(run, self.experiment.data, folder, command, self.environment))
        )

    def _ended(self, one: StartedRun) -> bool:
        status = one.job.status()
        if status is None:
            return False
        if status == ELSEWHERE:
            self.elsewhere.append(one.run.name)
        elif status or not self._enter_finished(one.run):
            self.failed[one.run.name] = f"{one.folder.failure(status)} (all of it: {one.folder.log})"
            print(f"FAILED {one.run.name}: {self.failed[one.run.name]}", flush=True)
        else:
            key = (self.experiment.name, one.run.name)
            entered = next(row for row in read_ledger(self.out / FILE) if (row["recipe"], row["run"]) == key)
            print(f"done   {one.run.name}: {entered['measure']} {entered['score']}, {self._left()}", flush=True)
        return True

    def _enter_finished(self, run: PlannedRun) -> bool:
        """Whether the run is finished; its row is then in the ledger."""
        folder, ledger = self.folders[run.name], self.out / FILE
        results, settings = folder.results, folder.settings
        if results is None or settings is None:
            return False
        add_row(ledger, row(self.experiment, run, results, settings))
        return True

    def _done(self) -> float:
        """Runs' worth of training that is done."""
        return sum(self.folders[name].done(run) for name, run in self.runs.items())

    def _left(self) -> str:
        done = self._done()
        seconds, gained = time.monotonic() - self._started, done - self._done_before
        left = _duration(seconds / gained * (len(self.runs) - done)) if gained > 0 else "unknown time"
        return f"{done:.1f} of {len(self.runs)} runs' training done, {left} left"

    def _print_progress(self, active: Sequence[StartedRun]) -> None:
        running = ", ".join(f"{one.run.name} {one.folder.done(one.run):.0%}" for one in active)
        print(f"       {running}; {self._left()}", flush=True)


def show_plan(experiment: Experiment, runs: list[PlannedRun], out: Path) -> str:
    """The plan as a table: each run's cost by dsq-cost's paper profile, and how far it is."""
    rows = []
    for run in runs:
        cost = expected(run, experiment.workload)
        done = RunFolder(out / run.name).done(run)
        updates = run.max_update or f"{run.training.get('max-epoch', '?')} epochs"
        costs = {name: _range(cost, name) for name in ("arithmetic", "dram")}
        rows.append({"run": run.name, "updates": updates, **costs, "done": f"{done:.0%}"})
    note = (
        f"{len(runs)} runs. arithmetic, dram: dsq-cost's paper profile of {experiment.workload}, fixed-point 32 = 1, "
        "by the shares of updates; from .. to where plateaus decide; - in floating point"
    )
    return f"{table(rows)}\n\n{note}"


def _range(costs: Sequence[Cost], name: str) -> str:
    return " .. ".join(f"{getattr(cost, name):.4f}" for cost in costs) or "-"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def run_recipe(given: argparse.Namespace) -> None:
    experiment = load_experiment(given.recipe, given.set)
    if given.data:
        if experiment.data.kind == "generated":
            raise ValueError(f"--data {given.data}: {given.recipe} generates its own text: leave --data out")
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, path=str(given.data)))
    try:
        runs = plan(experiment, given.only)
        check(experiment, runs)
        for run in runs:
            RunFolder(given.out / run.name).check(run, experiment.data)
        if given.dry_run:
            print(show_plan(experiment, runs, given.out))
            return
        data_folder.check_present(experiment.data)
    except ValueError as error:
        raise ValueError(f"{given.recipe}: {error}") from None
    if given.submitit and given.engine != "submitit":
        raise ValueError(f"--submitit {given.submitit[0]}: does nothing without --engine submitit")
    make_folder(given.out)
    parameters = dict(word.partition("=")[::2] for word in given.submitit)
    engine = submitit_engine(given.out / "submitit", parameters) if given.engine == "submitit" else LocalJob
    data_folder.prepare(experiment.data, given.out / "data")
    signal.signal(signal.SIGTERM, _terminated)
    Session(experiment, runs, given.out, engine, given.threads).go(given.jobs)
    print(f"ledger: {given.out / FILE}; tables and picture: python -m analysis.experiments.report {given.out / FILE}")


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of all runs and the ledger")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the data are; default: the recipe's data.path")
    change = "a value in place of the recipe's outside [[runs]], as in training.max-epoch=1; may be given again"
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help=change)
    parser.add_argument("--only", action="append", metavar="GLOB", help="runs whose names match; may be given again")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its costs, and run nothing")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of a run (default: %(default)s)")
    parser.add_argument("--engine", choices=("local", "submitit"), default="local", help="default: %(default)s")
    parser.add_argument(
        "--submitit", action="append", default=[], metavar="NAME=VALUE", help="of submitit's, as in slurm_partition=gpu"
    )
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: run_recipe(given))


if __name__ == "__main__":
    sys.exit(main())
