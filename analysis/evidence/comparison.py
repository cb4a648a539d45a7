"""The page of the suite: by how much each setting differs from fp32, and from bf16 autocast, of the same seed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any

from analysis import ROOT
from analysis.evidence.ledger import Key, difference
from analysis.evidence.suite import FP32, SEEDS, Suite
from dsq.command import Record, table

PAGE = ROOT / "docs" / "evidence.md"
YARDSTICK = "bf16 autocast"
#: Student's t of 95 %, two-sided, by degrees of freedom from 1; further ones are near the last
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)

#: what the page calls a task's kind
_KINDS = {"language": "language models", "finetuning": "fine-tuning", "graph": "graphs"}


@dataclass(frozen=True)
class Mean:
    """A mean with half of its 95 % interval, which is NaN for a single value."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan

    @property
    def standard_error(self) -> float:
        return stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else math.nan

    @property
    def half(self) -> float:
        return (
            _T95[min(len(self.values) - 1, len(_T95)) - 1] * self.standard_error if len(self.values) > 1 else math.nan
        )

    def text(self, spec: str) -> str | None:
        """Format mean and half interval, as in +0.012 ± 0.034; None where there is no value."""
        if not self.values:
            return None
        half = "" if math.isnan(self.half) else f" ± {self.half:{spec.removeprefix('+')}}"
        return f"{self.mean:{spec}}{half}"


@dataclass(frozen=True)
class Evidence:
    """The rows of a suite that count, and milliseconds of a step by task and setting."""

    suite: Suite
    rows: Mapping[Key, Record]
    steps: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def losses(self, task: str, setting: str, other: str = FP32) -> Mean:
        """Differences of losses to fp32 of the same seed, less those of ``other``."""
        ours, theirs = self._above_fp32(task, setting), self._above_fp32(task, other)
        return Mean(tuple(ours[seed] - theirs[seed] for seed in ours if seed in theirs))

    def scores(self, task: str, setting: str) -> Mean:
        """Differences of scores to fp32 of the same seed."""
        pairs = self._pairs(task, setting).values()
        return Mean(tuple(float(row["score"]) - float(fp32["score"]) for row, fp32 in pairs))

    def saved(self, task: str, setting: str) -> Mean:
        """Ratios of the saved bytes to fp32's of the same seed."""
        mib = [(a.get("saved_mib"), b.get("saved_mib")) for a, b in self._pairs(task, setting).values()]
        return Mean(tuple(float(ours) / float(theirs) for ours, theirs in mib if ours and theirs))

    def time(self, task: str, setting: str) -> Mean:
        """The ratio of a step's time to fp32's."""
        ours, theirs = (self.steps.get((task, name)) for name in (setting, FP32))
        return Mean((ours / theirs,) if ours and theirs else ())

    def over_tasks(self, mean_of: Callable[[str], Mean], tasks: Sequence[str] | None = None) -> Mean:
        """The means of the tasks (None: all) that have any."""
        means = (mean_of(task) for task in tasks or self.suite.tasks)
        return Mean(tuple(one.mean for one in means if one.values))

    def column(self, task: str, setting: str, name: str) -> list[float]:
        rows = (self.rows.get((task, setting, seed)) for seed in SEEDS)
        return [float(row[name]) for row in rows if row and row.get(name)]

    def regressions(self, setting: str) -> list[str]:
        """Tasks whose loss is above the yardstick's by more than two standard errors of the paired differences."""
        losses = {task: self.losses(task, setting, YARDSTICK) for task in self.suite.tasks}
        return [task for task, loss in losses.items() if len(loss.values) > 1 and loss.mean > 2 * loss.standard_error]

    def _above_fp32(self, task: str, setting: str) -> dict[int, float]:
        """Differences of losses to fp32, by seed."""
        pairs = self._pairs(task, setting).items()
        return {seed: difference(self.suite.tasks[task], row, fp32) for seed, (row, fp32) in pairs}

    def _pairs(self, task: str, setting: str) -> dict[int, tuple[Record, Record]]:
        """The setting's rows with fp32's of the same seed, by seed."""
        pairs = {}
        for seed in SEEDS:
            row, fp32 = (self.rows.get((task, name, seed)) for name in (setting, FP32))
            if row and fp32:
                pairs[seed] = row, fp32
        return pairs


def page_tables(evidence: Evidence) -> dict[str, Callable[..., str]]:
    """The makers of docs/evidence.md's tables, by name (analysis/tables.py): over tasks, by task, what ran where."""
    return {
        "settings": lambda: over_tasks(evidence, _asked(evidence.suite, 3)),
        "runs": lambda: _schedules(evidence) + _tasks(evidence),
        "regressions": partial(_regressions, evidence),
        "tasks": partial(_by_task, evidence),
        "setting-by-task": lambda tasks, *settings: table(
            by_setting(evidence, tasks.split(","), settings), markdown=True
        ),
        "provenance": partial(_provenance, evidence),
    }


def _asked(suite: Suite, tier: int) -> list[str]:
    """The settings that ``tier`` and those below it ask for; further ones are asked for of a task or two."""
    return list(dict.fromkeys(run.setting.name for run in suite.runs(min(tier, len(suite.tiers) - 1))))


def _tasks(evidence: Evidence) -> str:
    """A line of the list: the tasks that fp32 ran, by their kind."""
    kinds: dict[str, list[str]] = {}
    for task in evidence.suite.tasks.values():
        if evidence.column(task.name, FP32, "loss"):
            kinds.setdefault(_KINDS.get(task.kind, task.kind), []).append(task.name)
    return "- Tasks: " + ", ".join(f"{kind} ({', '.join(names)})" for kind, names in kinds.items()) if kinds else ""


def _schedules(evidence: Evidence) -> str:
    """A line of the list for each setting that ran whose levels rise."""
    ran = {setting for _, setting, _ in evidence.rows}
    rising = [one for one in evidence.suite.settings.values() if one.rise_at is not None and one.name in ran]
    return "".join(f"- {one.name}: `{one.levels}`; rises after {one.rise_at:.0%} of the updates\n" for one in rising)


def over_tasks(evidence: Evidence, settings: Iterable[str], tasks: Sequence[str] | None = None) -> str:
    """A row a setting: means over the tasks (None: all) that have runs of it; (n): over n of them. Times are over the
    tasks that have times of all settings, if there are any."""
    records: list[dict[str, Any]] = []
    over = partial(evidence.over_tasks, tasks=tasks)
    settings = [name for name in settings if name != FP32 and over(partial(evidence.losses, setting=name)).values]
    timed = [
        task
        for task in tasks or evidence.suite.tasks
        if settings and all(evidence.time(task, name).values for name in settings)
    ]
    for name in settings:
        losses = over(partial(evidence.losses, setting=name))
        above = over(partial(evidence.losses, setting=name, other=YARDSTICK))
        scores = over(partial(evidence.scores, setting=name))
        saved = over(partial(evidence.saved, setting=name))
        record = {"setting": name, "tasks": len(losses.values), "loss minus fp32": losses.text("+.3f")}
        record["loss minus bf16 autocast"] = None if name == YARDSTICK else above.text("+.3f")
        record["score minus fp32"] = scores.text("+.2f")
        fewer = f" ({len(saved.values)})" if len(saved.values) < len(losses.values) else ""
        record["saved / fp32"] = f"{saved.mean:.2f}{fewer}" if saved.values else None
        if timed:
            times = evidence.over_tasks(partial(evidence.time, setting=name), timed)
            record[f"time / fp32 ({len(timed)} tasks)"] = f"{times.mean:.2f}"
        records.append(record)
    return table(records, markdown=True) if records else "No pair of runs yet."


def _regressions(evidence: Evidence) -> str:
    lines = []
    for name in _asked(evidence.suite, 3):
        if name != FP32 and (tasks := evidence.regressions(name)):
            above = (f"{task} {evidence.losses(task, name, YARDSTICK).mean:+.3f}" for task in tasks)
            lines.append(f"- {name}: {', '.join(above)}")
    return "\n".join(lines) or "none."


def _by_task(evidence: Evidence, *settings: str) -> str:
    """Losses and scores over fp32's, and the saved bytes, a row per task. If the suite has none of ``settings`` (a
    suite of your own), of all that tier 2 asks for."""
    names = [name for name in settings if name in evidence.suite.settings]
    names = names or [name for name in _asked(evidence.suite, 2) if name != FP32]
    records: list[Record] = []
    for task in (task for task in evidence.suite.tasks if evidence.column(task, FP32, "loss")):
        record: dict[str, Any] = {"task": task}
        for quantity, figures, spec in (("loss", evidence.losses, ".3f"), ("score", evidence.scores, ".2f")):
            record[f"{quantity}: {FP32}"] = f"{fmean(evidence.column(task, FP32, quantity)):{spec}}"
            record |= {f"{quantity}: {name}": figures(task, name).text(f"+{spec}") for name in names}
        for name in names:
            shares = [
                f"{one.mean:.2f}" for one in (evidence.saved(task, name), evidence.time(task, name)) if one.values
            ]
            record[f"saved, time: {name}"] = ", ".join(shares) or None
        records.append(record)
    return table(records, markdown=True) if records else "No run yet."


def by_setting(evidence: Evidence, tasks: Sequence[str], settings: Iterable[str]) -> list[dict[str, Any]]:
    """A record a setting; a cell has losses and scores minus fp32's on one of ``tasks``."""
    records: list[dict[str, Any]] = []
    for name in settings:
        record: dict[str, Any] = {"setting": name}
        for task in tasks:
            loss, score = evidence.losses(task, name), evidence.scores(task, name)
            record[task] = f"{loss.text('+.3f')}; {score.text('+.2f')}" if loss.values else None
        records.append(record)
    return records


def _provenance(evidence: Evidence) -> str:
    """Runs that count, processors, dates and versions."""
    lines = [f"Runs that count: {len(evidence.rows)}."]
    for name, column in (("Processors", "cpu"), ("Dates", "date"), ("PyTorch", "torch")):
        values = sorted({str(row[column]) for row in evidence.rows.values() if row.get(column)})
        lines += [f"{name}: {', '.join(values)}."] if values else []
    return "\n\n".join(lines)
