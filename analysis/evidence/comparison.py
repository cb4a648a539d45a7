"""The page of the suite: by how much each setting differs from fp32, and from bf16 autocast, of the same seed."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

INTRODUCTION = """# Evidence

The suite of real tasks ([analysis/evidence](../analysis/evidence)) judges every default and every figure. The yardstick
is bf16 autocast. Each run is paired with fp32's of its seed: the same initial weights and batches. A setting leaves
`dsq.DSQConfig` at its defaults but for what its name says; "all" is `stash="all"`.

    make evidence DATA=../data                   # runs what the ledger lacks, then writes this page

- Loss: on held-out data. In translation (label smoothing of 0.1) and language modelling nats a token, with differences
  in nats; elsewhere nats a sample, with differences as shares of fp32's loss.
- Score: BLEU in translation; elsewhere the share of right tokens or classes in %.
- ±: half of the 95 % interval of the mean (Student's t), over tasks in the first table, over seeds in the second.
- Held: MiB that a step keeps between forward and backward. Minutes: of one core; these models are small, and time is
  gained in wide layers ([performance](performance.md)).
- The backward of `[8,4,8,8]` and `[8,4,8,8] all` reads weights in 5 bits. The rows of all other settings are older; in
  them it read weights at q1, as the paper does.
"""


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
    """The rows of a suite that count."""

    suite: Suite
    rows: Mapping[Key, Record]

    def losses(self, task: str, setting: str, other: str = FP32) -> Mean:
        """Differences of losses to fp32 of the same seed, less those of ``other``."""
        ours, theirs = self._above_fp32(task, setting), self._above_fp32(task, other)
        return Mean(tuple(ours[seed] - theirs[seed] for seed in ours if seed in theirs))

    def scores(self, task: str, setting: str) -> Mean:
        """Differences of scores to fp32 of the same seed."""
        pairs = self._pairs(task, setting).values()
        return Mean(tuple(float(row["score"]) - float(fp32["score"]) for row, fp32 in pairs))

    def shares(self, task: str, setting: str, column: str) -> Mean:
        """Ratios of ``column`` to fp32's of the same seed; of times where one processor measured both."""
        pairs = [(a, b) for a, b in self._pairs(task, setting).values() if a.get(column) and b.get(column)]
        timed = column == "seconds"
        known = [(float(a[column]), float(b[column])) for a, b in pairs if not timed or a.get("cpu") == b.get("cpu")]
        return Mean(tuple(ours / theirs for ours, theirs in known))

    def over_tasks(self, found: Callable[[str], Mean], tasks: Sequence[str] | None = None) -> Mean:
        """The means of the tasks (None: all) that have any."""
        means = (found(task) for task in tasks or self.suite.tasks)
        return Mean(tuple(one.mean for one in means if one.values))

    def column(self, task: str, setting: str, name: str) -> list[float]:
        rows = (self.rows.get((task, setting, seed)) for seed in SEEDS)
        return [float(row[name]) for row in rows if row and row.get(name)]

    def strays(self, setting: str) -> list[str]:
        """Tasks whose loss is above the yardstick's by more than two standard errors of the paired differences."""
        found = {task: self.losses(task, setting, YARDSTICK) for task in self.suite.tasks}
        return [task for task, one in found.items() if len(one.values) > 1 and one.mean > 2 * one.standard_error]

    def _above_fp32(self, task: str, setting: str) -> dict[int, float]:
        """Differences of losses to fp32, by seed."""
        pairs = self._pairs(task, setting).items()
        return {seed: difference(self.suite.tasks[task], row, fp32) for seed, (row, fp32) in pairs}

    def _pairs(self, task: str, setting: str) -> dict[int, tuple[Record, Record]]:
        """The setting's rows with fp32's of the same seed, by seed."""
        found = {}
        for seed in SEEDS:
            row, fp32 = (self.rows.get((task, name, seed)) for name in (setting, FP32))
            if row and fp32:
                found[seed] = row, fp32
        return found


def page(suite: Suite, rows: Mapping[Key, Record]) -> str:
    """The page: a table over tasks, a table by task, and what was run where."""
    evidence = Evidence(suite, rows)
    parts = [INTRODUCTION.strip() + _schedules(suite), "## Over the tasks", over_tasks(evidence, _of_many_tasks(suite))]
    parts += ["Above bf16 autocast by more than two standard errors:", _strays(evidence)]
    parts += ["## By task", _by_task(evidence), "## What was run", _whereabouts(evidence)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _of_many_tasks(suite: Suite) -> list[str]:
    """The settings that tier 3 and those below it ask for; further ones are asked for of a task or two."""
    return list(dict.fromkeys(run.setting.name for run in suite.runs(min(3, len(suite.tiers) - 1))))


def _schedules(suite: Suite) -> str:
    """A line of the list for each setting whose levels rise."""
    rising = [one for one in suite.settings.values() if one.rise_at is not None and one.stash == "linears"]
    return "".join(
        f"\n- {one.name}: `{one.levels}`, which rises after {one.rise_at:.0%} of the updates." for one in rising
    )


def over_tasks(evidence: Evidence, settings: Iterable[str], tasks: Sequence[str] | None = None) -> str:
    """A row a setting: means over the tasks (None: all) that have runs of it."""
    records: list[dict[str, Any]] = []
    over = partial(evidence.over_tasks, tasks=tasks)
    for name in settings:
        losses = over(partial(evidence.losses, setting=name))
        above = over(partial(evidence.losses, setting=name, other=YARDSTICK))
        scores = over(partial(evidence.scores, setting=name))
        if losses.values and name != FP32:
            record = {"setting": name, "tasks": len(losses.values), "loss minus fp32": losses.text("+.3f")}
            record["loss minus bf16 autocast"] = None if name == YARDSTICK else above.text("+.3f")
            record["score minus fp32"] = scores.text("+.2f")
            for label, column in (("held / fp32", "held_mib"), ("time / fp32", "seconds")):
                shares = over(partial(evidence.shares, setting=name, column=column))
                record[label] = f"{shares.mean:.2f}" if shares.values else None
            records.append(record)
    return table(records, markdown=True) if records else "No pair of runs yet."


def _strays(evidence: Evidence) -> str:
    found = {name: evidence.strays(name) for name in evidence.suite.settings if name not in (FP32, YARDSTICK)}
    return "\n".join(f"- {name}: {', '.join(tasks)}" for name, tasks in found.items() if tasks) or "none."


def _by_task(evidence: Evidence) -> str:
    pairs = itertools.product(evidence.suite.tasks, evidence.suite.settings)
    records = [_record(evidence, task, name) for task, name in pairs if evidence.column(task, name, "loss")]
    return table(records, markdown=True) if records else "No run yet."


def _record(evidence: Evidence, task: str, name: str) -> dict[str, Any]:
    def mean(column: str, spec: str, scale: float = 1.0) -> str | None:
        values = evidence.column(task, name, column)
        return f"{fmean(values) / scale:{spec}}" if values else None

    return {
        "task": task,
        "setting": name,
        "seeds": len(evidence.column(task, name, "loss")),
        "loss": mean("loss", ".3f"),
        "minus fp32": None if name == FP32 else evidence.losses(task, name).text("+.3f"),
        "score": mean("score", ".1f"),
        "score minus fp32": None if name == FP32 else evidence.scores(task, name).text("+.2f"),
        "held": mean("held_mib", ".0f"),
        "minutes": mean("seconds", ".1f", 60),
    }


def _whereabouts(evidence: Evidence) -> str:
    """Tiers by how much of them is there, then processors, dates and revisions."""
    planned: Sequence[set[Key]] = [
        {run.key for run in evidence.suite.runs(n)} for n in range(len(evidence.suite.tiers))
    ]
    shares = [f"tier {n}: {len(keys & set(evidence.rows))} of {len(keys)}" for n, keys in enumerate(planned)]
    lines = ["; ".join(shares) + " runs (of tier 3, seeds 2 and 3 where the first lies within the noise)."]
    for name, column in (("Processor", "cpu"), ("Date", "date"), ("Revision of dsq", "revision"), ("PyTorch", "torch")):
        values = sorted({str(row[column]) for row in evidence.rows.values() if row.get(column)})
        lines += [f"{name}: {', '.join(values)}."] if values else []
    return "\n\n".join(lines)
