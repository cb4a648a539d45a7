"""Runs the suite of real tasks, or goes on with it, and writes the table of what it says.

    python -m analysis.evidence run --tier 1 --data ../data
    python -m analysis.evidence run --tier 2 --tasks mrpc rte --settings fp32 "[8,4,4,8]"
    python -m analysis.evidence time --tier 3 --data ../data
    python -m analysis.evidence table
    python -m analysis.evidence run --suite analysis/evidence/paper.toml --ledger runs/paper.csv --tier 0 --seeds 1

Tier 0: three translations and a language model, fp32, bf16 autocast and [8,4,8,8]; tier 1: a task of each kind; tier 2:
all tasks; tier 3: all methods; tier 4: few bits on one task, from which dsq.DSQConfig warns; tiers 5 to 7: what the
papers of GACT, Mesa and WTA-CRS compare; tier 8: published recipes; tier 9: which product breaks in MXFP4. A tier
includes those below it. What is in the ledger is not run again.
"""

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from analysis import ROOT
from analysis.evidence.comparison import PAGE, Evidence, page_tables
from analysis.evidence.ledger import LEDGER, Session, read_rows
from analysis.evidence.steps import read_steps, time_steps
from analysis.evidence.suite import SUITE, Run, Suite, load_suite, locate
from analysis.tables import written
from dsq.command import OneLineParser, count, guarded, write_text


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run what the ledger lacks")
    timer = commands.add_parser("time", help="time a step of what the ledger has")
    prepared = "folder of prepared data and logs (default: runs/evidence)"
    places = "folders in which the tasks' files are looked for (default: data)"
    writer = commands.add_parser("table", help="write docs/evidence.md from the ledger")
    one = commands.add_parser("one", help="train once, in this process, on one thread, past the ledger")
    for command in (runner, timer):
        command.add_argument("--tier", type=int, default=1, metavar="N", help="default: %(default)s")
        command.add_argument("--tasks", nargs="+", metavar="TASK", help="only these")
        command.add_argument("--settings", nargs="+", metavar="SETTING", help="only these")
    for command in (runner, timer, one):
        command.add_argument("--data", type=Path, nargs="+", default=[ROOT / "data"], metavar="DIR", help=places)
        command.add_argument("--work", type=Path, default=ROOT / "runs" / "evidence", metavar="DIR", help=prepared)
    for command in (runner, one):
        command.add_argument("--device", default="cpu", help="PyTorch's name of it (default: %(default)s)")
    runner.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these")
    timer.add_argument("--rounds", type=count, default=7, metavar="N", help="turns of each setting (default: 7)")
    runner.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    runner.add_argument("--again", action="store_true", help="run what is in the ledger too, in place of its rows")
    for name, kind in (("--task", str), ("--setting", str), ("--seed", int)):
        one.add_argument(name, type=kind, required=True)
    one.add_argument("--out", type=Path, required=True, metavar="RESULT.json")
    for command in (runner, timer, writer, one):
        command.add_argument("--suite", type=Path, default=SUITE, metavar="FILE.toml", help="default: suite.toml")
    for command in (runner, timer, writer):
        command.add_argument("--ledger", type=Path, default=LEDGER, metavar="FILE.csv")
    writer.add_argument("--out", type=Path, default=PAGE, metavar="FILE.md")
    options = parser.parse_args(arguments)

    work = {"run": run, "time": time, "table": write, "one": train}[options.command]
    return guarded(parser.prog, lambda: work(options, load_suite(options.suite)))


def run(options: Namespace, suite: Suite) -> None:
    """Run what is asked for and the ledger lacks."""
    planned = [
        planned_run
        for planned_run in planned_runs(options, suite)
        if not options.seeds or planned_run.seed in options.seeds
    ]
    roots = [root.resolve() for root in options.data]
    Session(suite, roots, options.work.resolve(), options.ledger, options.device).go(
        planned, options.jobs, options.again
    )


def time(options: Namespace, suite: Suite) -> None:
    """Time a step of what is asked for and the ledger has."""
    rows = read_rows(options.ledger, suite)
    pairs = dict.fromkeys(
        planned_run.key[:2] for planned_run in planned_runs(options, suite) if planned_run.key in rows
    )
    time_steps(suite, pairs, options.data, options.work.resolve(), options.rounds)


def planned_runs(options: Namespace, suite: Suite) -> list[Run]:
    for name in options.tasks or ():
        suite.run(name, next(iter(suite.settings)), 1)
    for name in options.settings or ():
        suite.run(next(iter(suite.tasks)), name, 1)
    return [
        planned_run
        for planned_run in suite.runs(options.tier)
        if (not options.tasks or planned_run.task.name in options.tasks)
        and (not options.settings or planned_run.setting.name in options.settings)
    ]


def write(options: Namespace, suite: Suite) -> None:
    """Write the page of a ledger: docs/evidence.md with tables of it."""
    kinds = page_tables(Evidence(suite, read_rows(options.ledger, suite), read_steps()))
    write_text(options.out, written(PAGE.read_text(encoding="utf-8"), kinds))


def train(options: Namespace, suite: Suite) -> None:
    """Train once in this process."""
    import torch

    from analysis.evidence.problems import run_once

    torch.set_num_threads(1)
    planned_run = suite.run(options.task, options.setting, options.seed)
    files = locate(planned_run.task, options.data)
    result = asdict(run_once(planned_run.task, planned_run.setting, options.seed, files, options.work, options.device))
    if options.device != "cpu":
        accelerator = torch.get_device_module(options.device)
        result |= {
            "cpu": accelerator.get_device_name(),
            "peak_mib": round(accelerator.max_memory_allocated() / 2**20, 1),
        }
    write_text(options.out, json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
