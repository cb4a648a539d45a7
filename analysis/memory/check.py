"""Memory as the ledger predicts it and as running models have it, on this machine's CPU.

python -m analysis.memory.check [MODEL...] [--markdown] [--measured analysis/results/memory.json]

Saved: what malloc has given out between forward and backward. Peak: the most during both. Every malloc of the process
is counted (analysis.stash.allocator); parameters, gradients and batch are there before. Small models (models.py),
dropout off.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from analysis.memory.methods import LINEARS, METHODS, CheckedMethod
from analysis.memory.models import NAMES, checked_model
from analysis.stash.allocator import figures
from costmodel.model.memory import peak_memory
from costmodel.model.operations import Workload
from dsq.arguments import choice
from dsq.command import OneLineParser, guarded, table

Record = dict[str, Any]
MEGA = 1e6


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.memory.check", description=__doc__)
    parser.add_argument("model", nargs="*", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="measurements to read, or to write if not there")
    options = parser.parse_args(argv)
    return guarded(parser.prog, lambda: run(options))


def run(arguments: argparse.Namespace) -> None:
    names = arguments.model or NAMES
    for name in names:
        choice("model", name, NAMES)
    held = measurements(names, arguments.measured)
    records = [record for name in names for record in compare(name, held[name])]
    shown = {"model": "", "method": "", "saved_MB": ".2f", "predicted_MB": ".2f", "off": "+.1%"}
    shown |= {"peak_MB": ".2f", "predicted_peak_MB": ".2f", "peak_off": "+.1%", "peak_at": ""}
    print(table(records, shown, markdown=arguments.markdown))
    summary = [_summary(name, [record for record in records if record["model"] == name]) for name in names]
    summary.append(_summary("all", records))
    print("\n" + table(summary, dict.fromkeys(summary[0], ".1%") | {"model": ""}, markdown=arguments.markdown))


def _summary(name: str, records: list[Record]) -> Record:
    """How far the predictions are off, in the median and at worst."""
    found: Record = {"model": name}
    for title, column in (("saved", "off"), ("peak", "peak_off")):
        errors = [abs(record[column]) for record in records]
        found |= {f"{title}: median": median(errors), f"{title}: worst": max(errors)}
    return found


def measurements(names: Iterable[str], path: Path | None) -> dict[str, Any]:
    """Bytes of each model and method: a process for each model."""
    known: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    known |= {name: figures("analysis.memory.held", name) for name in names if name not in known}
    if path:
        path.write_text(json.dumps(known, indent=1))
    return known


def compare(name: str, held: dict[str, Any]) -> list[Record]:
    workload = checked_model(name).workload
    return [_record(name, method, workload, held[method.name]) for method in METHODS if method.name in held]


def _record(name: str, method: CheckedMethod, workload: Workload, held: dict[str, int]) -> Record:
    workload = workload.freezing(LINEARS) if method.frozen else workload
    memory = peak_memory(workload, replace(method.predicted, accumulates=True))  # gradients are there before
    between = float(memory.totals[-1])
    above = memory.peak - between
    return {
        **{"model": name, "method": method.name, "saved_MB": held["stash"] / MEGA},
        **{"predicted_MB": memory.saved / MEGA, "off": memory.saved / held["stash"] - 1},
        **{"peak_MB": held["peak"] / MEGA, "predicted_peak_MB": above / MEGA},
        **{"peak_off": above / held["peak"] - 1, "peak_at": memory.cause},
    }


if __name__ == "__main__":
    sys.exit(main())
