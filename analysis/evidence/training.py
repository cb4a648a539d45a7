"""One training of the suite: python -m analysis.evidence.training --task T --setting S --seed N --out RESULT.json"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import torch

from analysis.evidence.loop import Result, train
from analysis.evidence.problems import make
from analysis.evidence.suite import Setting, Task, load_suite, locate
from dsq.command import OneLineParser, guarded, write_text

PROG = "python -m analysis.evidence.training"


def run(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Result:
    """Train once, or ``task.sizes["repeats"]`` times from seeds of their own for the mean.

    Raises ValueError where the setting cannot be put on the task's model.
    """
    if task.kind == "translation":
        from analysis.evidence.translation import translate  # needs fairseq

        return translate(task, setting, seed, files, work)
    results = []
    for repeat in range(task.sizes.get("repeats", 1)):
        torch.manual_seed(100 * seed + repeat)
        results.append(train(make(task, 100 * seed + repeat, files), task, setting))
    return Result(fmean(one.loss for one in results), fmean(one.score for one in results), results[0].held_mib)


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--task", required=True)
    parser.add_argument("--setting", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of prepared data")
    parser.add_argument("--out", type=Path, required=True, metavar="RESULT.json")
    given = parser.parse_args(arguments)

    def work() -> None:
        torch.set_num_threads(1)
        asked = load_suite().run(given.task, given.setting, given.seed)
        files = locate(asked.task, given.data)
        write_text(given.out, json.dumps(asdict(run(asked.task, asked.setting, given.seed, files, given.work))))

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
