"""What comparisons in two halves share: bytes in processes of their own, then times in this one."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from analysis.timing.race import race
from dsq.command.parser import OneLineParser, count
from dsq.command.table import table


def halves_parser(prog: str, description: str | None, rounds: int) -> OneLineParser:
    """The options that they have in common."""
    made = OneLineParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def measure_halves(only: str | None, nbytes: Callable[[], None], times: Callable[[], None]) -> None:
    """Both halves, or the one that ``--only`` asks for."""
    if only != "time":
        nbytes()
    if only != "bytes":
        times()
