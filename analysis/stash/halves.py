"""Comparisons in two halves: bytes in counted processes of their own, then times in this one."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from analysis.timing.race import race
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import table


def halves_parser(prog: str, description: str | None, rounds: int) -> OneLineParser:
    """The options that they have in common."""
    made = OneLineParser(prog=prog, description=description)
    made.add_argument("--only", choices=("bytes", "time"), help="half of the work: bytes and error, or time")
    made.add_argument("--rounds", type=count, default=rounds, help=f"timed steps of each setup (default {rounds})")
    return made


def print_times(of: str, baseline: str, losses: Mapping[str, Callable[[], Tensor]], rounds: int, digits: str) -> None:
    """A step of each setup over the baseline's as a table; ``of``: the head of the column of names."""
    steps = {setup: partial(step, loss) for setup, loss in losses.items()}
    timed = race("step", (baseline, steps.pop(baseline)), steps, rounds)
    rows = [{of: result.name, "time": result.ratio, "±": result.stray} for result in timed.results]
    print(table(rows, {of: "", "time": digits, "±": digits}, markdown=True))
    print(f"\n{baseline} against itself: {timed.control.ratio:.3f} ± {timed.control.stray:.3f}")


def step(loss: Callable[[], Tensor]) -> None:
    loss().backward()


def halves_main(
    parser: OneLineParser,
    counted: Callable[[Namespace], dict[str, Any]],
    show_bytes: Callable[[Namespace], None],
    show_times: Callable[[Namespace], None],
) -> int:
    """The command; its exit status. ``--count`` is for the processes that it starts itself: they print ``counted``."""
    args = parser.parse_args()

    def work() -> None:
        if args.count:
            print(json.dumps(counted(args)))
            return
        if args.only != "time":
            show_bytes(args)
        if args.only != "bytes":
            show_times(args)

    return guarded(parser.prog, work)
