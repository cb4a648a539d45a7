"""The ledger, a row a run (task, setting, seed), and the runs that it lacks, each a process with one thread.

A row counts while its ``definition`` is that of the suite. A rerun takes the place of the earlier row.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from resource import struct_rusage

from filelock import FileLock

from analysis import ROOT, make_folder
from analysis.evidence.suite import FP32, IN_NATS, SEEDS, Run, Suite, Task, locate
from dsq.command import Record, as_csv, processor, write_text

LEDGER = ROOT / "analysis" / "results" / "evidence.csv"
#: what decides a run's numbers, but for the suite
CODE = ("dsq", "kernels", "fairseq_plugin")
Key = tuple[str, str, int]


def read_csv(path: Path) -> list[Record]:
    """The rows of a file of results; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path, suite: Suite | None = None) -> dict[Key, Record]:
    """The rows by task, setting and seed; only those that count in ``suite``, if one is given."""
    rows = {(row["task"], row["setting"], int(row["seed"])): row for row in read_csv(path)}
    if suite is None:
        return rows
    return {key: row for key, row in rows.items() if suite.definitions.get(key[:2]) == row["definition"]}


def enter(path: Path, row: Record) -> None:
    """Put a row into the ledger, in place of an earlier one of the same run. Processes take turns."""
    with FileLock(path.parent / ".turn"):
        rows = read_rows(path)
        rows[row["task"], row["setting"], row["seed"]] = row
        write_text(path, as_csv(list(rows.values())))


def difference(task: Task, row: Record, fp32: Record) -> float:
    """Return the loss less fp32's: in nats a token, or for a classifier as a share of fp32's loss."""
    loss, reference = float(row["loss"]), float(fp32["loss"])
    return loss - reference if task.kind in IN_NATS else loss / reference - 1


def revision() -> str:
    """The last commit that changed CODE, with "+" behind it where CODE has changes since; "" without a checkout."""
    if shutil.which("git") is None:
        return ""

    def git(*words: str) -> str:
        process = subprocess.run(["git", *words, "--", *CODE], cwd=ROOT, capture_output=True, text=True, check=False)
        return process.stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("log", "-1", "--format=%h", "--abbrev=12") + changed


@dataclass(frozen=True)
class Session:
    """One call of the command. Paths are absolute, for the processes that it starts."""

    suite: Suite
    roots: Sequence[Path]  #: folders in which the tasks' files are looked for
    work: Path  #: a folder for prepared data and logs
    ledger: Path
    device: str = "cpu"  #: whose name and peak of memory a row has, where it is another
    failed: list[Run] = field(default_factory=list)

    def go(self, planned: Iterable[Run], jobs: int = 1, again: bool = False) -> None:
        """Run what is not in the ledger, in order; with ``again`` the rest too.

        Raises ValueError where runs failed; the others are done then.
        """
        runs = self._with_data(list(planned))
        make_folder(self.work)
        done = {} if again else read_rows(self.ledger, self.suite)
        missing = [run for run in runs if run.key not in done]
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are in the ledger", flush=True)
        pool = ThreadPoolExecutor(jobs)
        try:
            list(pool.map(self._run, missing))
        finally:
            pool.shutdown(cancel_futures=True)
        if self.failed:
            first = self.failed[0]
            raise ValueError(f"{len(self.failed)} of {len(missing)} runs failed, first {first}: {self._log(first)}")

    def _with_data(self, planned: list[Run]) -> list[Run]:
        """The runs whose data are there. Prints a line for each task whose data are not."""
        absent = set()
        for task in {run.task.name: run.task for run in planned}.values():
            try:
                locate(task, self.roots)
            except ValueError as error:
                absent.add(task.name)
                print(f"skipped {task.name}: {error}", flush=True)
        return [run for run in planned if run.task.name not in absent]

    def _run(self, run: Run) -> None:
        if run.noise is not None and run.seed != SEEDS[0] and self._is_clear(run, run.noise):
            return
        print(f"start   {run}", flush=True)
        code = revision()
        with tempfile.TemporaryDirectory(dir=self.work, prefix="run-") as folder:
            result = Path(folder) / "result.json"
            status, used = self._train(run, result)
            if status or not result.exists():
                self.failed.append(run)
                print(f"FAILED  {run}: {self._log(run)}", flush=True)
                return
            record = json.loads(result.read_text(encoding="utf-8"))
        row = {"task": run.task.name, "setting": run.setting.name, "seed": run.seed, **record}
        row["seconds"] = round(used.ru_utime + used.ru_stime, 1)
        row.setdefault("peak_mib", round(used.ru_maxrss / 1024, 1))
        row.setdefault("cpu", processor())
        row |= {"date": date.today().isoformat(), "revision": code, "torch": version("torch")}
        enter(self.ledger, row | {"definition": run.definition})
        print(f"done    {run}: loss {row['loss']:.4f}, score {row['score']:.2f}, {row['seconds']:.0f} s", flush=True)

    def _train(self, run: Run, result: Path) -> tuple[int, struct_rusage]:
        """The exit status of the run's process, and what it and its own processes used: seconds of a core, memory."""
        options = {
            "task": run.task.name,
            "setting": run.setting.name,
            "seed": run.seed,
            "work": self.work,
            "out": result,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        words += ["--device", self.device, "--suite", str(self.suite.path.resolve()), "--data", *map(str, self.roots)]
        with self._log(run).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "analysis.evidence", "one", *words],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, used

    def _is_clear(self, run: Run, noise: float) -> bool:
        """Whether the first seed differs from fp32's by more than ``noise``, so that the others need not run."""
        rows = read_rows(self.ledger, self.suite)
        first = rows.get((run.task.name, run.setting.name, SEEDS[0]))
        fp32 = rows.get((run.task.name, FP32, SEEDS[0]))
        return bool(first and fp32 and abs(difference(run.task, first, fp32)) > noise)

    def _log(self, run: Run) -> Path:
        return self.work / f"{run.task.name}, {run.setting.name}, {run.seed}.log"
