"""Times a training step of a task under each setting: settings take turns in one process, on one thread.

The seconds of a run in the ledger hold what else it does, and ran beside another day's load: they are no measure.
"""

from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

from analysis import ROOT
from analysis.evidence.ledger import read_csv
from analysis.evidence.suite import SEEDS, Suite, locate
from dsq.command import Record, as_csv, processor, write_text

STEPS = ROOT / "analysis" / "results" / "steps.csv"
_WARM = 3  #: steps in which kernels are chosen, and a policy measures what it does


def read_steps(path: Path = STEPS) -> dict[tuple[str, str], float]:
    """Milliseconds by task and setting."""
    return {(row["task"], row["setting"]): float(row["ms"]) for row in read_csv(path)}


def time_steps(
    suite: Suite, asked: Iterable[tuple[str, str]], roots: Sequence[Path], work: Path, rounds: int, path: Path = STEPS
) -> None:
    """Time the pairs of task and setting; a task's rows take the place of its earlier ones. ``work``: a folder."""
    import torch

    torch.set_num_threads(1)
    settings: dict[str, list[str]] = {}
    for task, setting in asked:
        settings.setdefault(task, []).append(setting)
    for task, names in settings.items():
        rows = [row for row in read_csv(path) if row["task"] != task]
        files = locate(suite.tasks[task], roots)
        write_text(path, as_csv(rows + _time_task(suite, task, names, files, work, rounds)))


def _time_task(
    suite: Suite, task: str, settings: Sequence[str], files: Sequence[Path], work: Path, rounds: int
) -> list[Record]:
    import torch

    from analysis.evidence import problems
    from analysis.timing import in_turns

    calls = {}
    for name in settings:
        torch.manual_seed(SEEDS[0])
        calls[name] = problems.steps(suite.tasks[task], suite.settings[name], SEEDS[0], files, work)
    milliseconds = {name: 1000 * median(durations) for name, durations in in_turns(calls, rounds, 1, _WARM).items()}
    print(task, *(f"{name}: {ms:.1f} ms" for name, ms in milliseconds.items()), sep="; ", flush=True)
    about = {"cpu": processor(), "date": date.today().isoformat(), "torch": version("torch")}
    return [{"task": task, "setting": name, "ms": round(ms, 2), **about} for name, ms in milliseconds.items()]
