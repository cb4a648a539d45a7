"""How long dsq-cost takes: sweeps of 131,072 configurations, and cold commands. Run: python analysis/bench_sweep.py"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from costmodel.formats import Format
from costmodel.hardware import load_hardware
from costmodel.sweep import grid, pareto, parse_range, sweep
from costmodel.workloads import REGISTRY, load_workload

RANGES = ["2:16,32"] * 4  # 16^4 configurations, in two formats
REPEATS = 3


def best(action: Callable[[], object]) -> float:
    """The least of a few wall-clock times, in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def sweep_seconds(name: str) -> tuple[int, float]:
    """(configurations, seconds) of costing every configuration of both formats and finding the fronts."""
    workload, hardware = load_workload(name), load_hardware("a100-80gb")
    precision = grid([parse_range(text) for text in RANGES])

    def both_formats() -> None:
        for kind in ("bfp", "fixed"):
            found = sweep(workload, precision, Format(kind), hardware)
            pareto([found.columns["dram"], found.columns["noise"]])

    return 2 * len(precision.q0), best(both_formats)


def command_seconds(*arguments: str) -> float:
    """A cold `dsq-cost`: a new process, from start to exit."""
    return best(
        lambda: subprocess.run([sys.executable, "-m", "costmodel", *arguments], check=True, capture_output=True)
    )


def main() -> None:
    for name in REGISTRY:
        count, seconds = sweep_seconds(name)
        print(f"sweep {name:26} {count:,} configurations {seconds:6.2f} s")
    for arguments in (("--help",), ("estimate", "[16,4,4,16]"), ("table",), ("explain", "[16,4,4,16]")):
        print(f"cold dsq-cost {' '.join(arguments):32} {command_seconds(*arguments):6.2f} s")


if __name__ == "__main__":
    main()
