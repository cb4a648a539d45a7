"""Hold the GPU kernels against the reference, and time them against their ceilings, within minutes.

    python -m analysis.gpu.check [--minutes 15] [--part PART]... [--out DIR]

Parts run in the order of their worth, each in a process of its own with a share of the minutes:

    compiled    compiled steps of a GPT of 1.3B parameters: bf16, packed by dsq, recomputed; then 124M and large batches
    agreement   every kernel against the reference on the CPU, bit for bit, over shapes and values full of edges
    steps       a GPT of 124M parameters: tokens a second and peak memory of fp32, bf16, recomputed, float8, dsq
    bandwidth   every kernel against a device-to-device copy that moves the same bytes
    products    every way to multiply quantized operands, beside PyTorch's float32, bfloat16, fp8 and torchao's int8
    graphs      whether a step waits for the device; the step as a CUDA graph
    sanitizer   a sample of the kernels under compute-sanitizer
    batches     the largest batch that fits the card
    devices     two processes over NCCL

A row is written to DIR/PART.jsonl as soon as it is known. One that raises has its error; one that ends its process is
marked, and the part goes on behind it. The same command goes on where the last one stopped; what was running then has
one more try. DIR/report.md is one page with all of it. Exits 1 if a kernel disagrees, or a row failed.

Without a GPU the parts run through Triton's interpreter on tiny tensors: they prove agreement, and show no times.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from analysis import ROOT, make_folder
from analysis.gpu import this_machine
from dsq.command import OneLineParser, Record, fail, guarded, table, write_text

PROG = "python -m analysis.gpu.check"


class Part(NamedTuple):
    trials: str  #: MODULE:FUNCTION, (machine) -> its trials; imported in its own process
    share: float  #: of the minutes
    processes: int = 1  #: on a GPU, each with a part of the trials: compiling takes most of their time


#: in the order of their worth
PARTS = {
    "compiled": Part("designs:compiled", 4.0),  # of 15 minutes 12
    "agreement": Part("agreement:agreement", 0.3, processes=12),
    "steps": Part("training:steps", 0.2),
    "bandwidth": Part("speed:bandwidth", 0.15),
    "products": Part("speed:multiply", 0.1),
    "graphs": Part("training:graphs", 0.1),
    "sanitizer": Part("agreement:sanitizer", 0.05),
    "batches": Part("training:largest_batches", 0.05),
    "devices": Part("training:two_devices", 0.05),
}
#: what says nothing without a GPU
TIMES = (
    *("ms", "us", "copy us", "x compiled bf16", "share of copy", "GB/s", "TFLOP/s", "tokens/s", "with quantizing ms"),
    "MB moved",
)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="that all parts together may take")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this (may be given again); default: all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"), help="folder for the results")
    parser.add_argument("--trials", type=int, help="only so many of each part (for a rehearsal)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # a process of a part: which of them
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        fail(PROG, "triton is not installed")
    if refused := guarded(PROG, lambda: make_folder(args.out)):
        return refused
    if args.worker is None and (missing := _missing()):
        print(missing, flush=True)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which no module has done yet
    if args.worker is not None:
        _work(args.part[0], args.out, args.worker, args.trials)
        return 0
    end = time.monotonic() + 60 * args.minutes
    parts = [name for name in args.part or PARTS if name != "compiled" or not _missing()]
    for position, name in enumerate(parts):  # what a part leaves over goes to those behind it
        share = PARTS[name].share / sum(PARTS[other].share for other in parts[position:])
        done = _run(name, args.out, max(end - time.monotonic(), 0.0) * share, args.trials)
        print(f"{name}: {len(_rows(args.out, name))} rows{'' if done else ', not finished'}", flush=True)
        write_text(args.out / "report.md", report(args.out))
    print(report(args.out))
    return int(any(row.get("disagree") or "error" in row for name in PARTS for row in _rows(args.out, name)))


def _missing() -> str:
    """Say what the PyTorch here cannot run, if it is older than dsq requires."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (required,) = (text.removeprefix("torch>=") for text in requirements if text.startswith("torch>="))
    if _version(torch.__version__) >= _version(required):
        return ""
    return f"PyTorch {torch.__version__} is older than {required}: no part compiled, and checkpoints will fail"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


# ---- a part: its processes, and what they write


def _run(name: str, out: Path, seconds: float, trials: int | None) -> bool:
    """Run the processes of a part until they are done or the seconds are over, and return whether all are done."""
    end = time.monotonic() + seconds
    shutil.rmtree(out / f"{name}.claims", ignore_errors=True)
    with ThreadPoolExecutor() as pool:
        return all(list(pool.map(lambda worker: _seen_through(name, out, worker, trials, end), _unfinished(out, name))))


def _seen_through(name: str, out: Path, worker: int, trials: int | None, end: float) -> bool:
    """Run one process of a part until it is done or time is over, begun again behind each trial that ended it; return
    whether it has nothing left to do."""
    while (left := end - time.monotonic()) > 0:
        _append(out, name, worker, {"started": True})
        process = _started(name, out, worker, trials)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            trial = _last(out, name, worker).get("begun")
            if trial and sum(line.get("begun") == trial for line in _lines(out, name)) > 1:
                error = "was running, in two calls, when the time of its part was over"
                _append(out, name, worker, {"name": trial, "error": error})
            return False
        last = _last(out, name, worker)
        if "begun" in last:
            _append(out, name, worker, {"name": last["begun"], "error": f"ended the process with status {status}"})
        elif "started" in last:  # it did not come as far as a trial: nor would it again
            _append(out, name, worker, {"name": name, "error": f"no trial: status {status}"})
            return True
        elif "done" in last:
            return True
    return False


def _workers(name: str) -> int:
    return min(PARTS[name].processes, os.cpu_count() or 1) if torch.cuda.is_available() else 1


def _started(name: str, out: Path, worker: int, trials: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "analysis.gpu.check", "--part", name, "--out", str(out), "--worker", str(worker)]
    with (out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command + (["--trials", str(trials)] if trials else []), stdout=log, stderr=log)


def _work(name: str, out: Path, worker: int, trials: int | None) -> None:
    """The trials of one process that have no row yet."""
    torch.set_num_threads(1 if _workers(name) > 1 else torch.get_num_threads())
    machine, names, parent = this_machine(), {row["name"] for row in _rows(out, name)}, os.getppid()
    for number, trial in enumerate(resolve_name(f"analysis.gpu.{PARTS[name].trials}")(machine)):
        if trials is not None and number >= trials:
            break
        if os.getppid() != parent:  # which was killed: the next call begins processes of its own
            return
        if trial.name in names or not _claimed(out, name, number):
            continue
        _append(out, name, worker, {"begun": trial.name})
        start, row = time.perf_counter(), {"name": trial.name, "machine": machine.name}
        try:
            _rehearsed_failure(name, number)
            row |= trial.call()
        except Exception as error:  # whatever a row dies of, the next ones are wanted
            lines = str(error).strip().splitlines() or [""]
            row["error"] = f"{type(error).__name__}: {lines[0]}"[:300]
        if not machine.is_gpu:
            row = {key: value for key, value in row.items() if key not in TIMES}
        _append(out, name, worker, row | {"seconds": round(time.perf_counter() - start, 2)})
        if "CUDA error" in str(row.get("error")):
            os._exit(1)  # whose context is lost; another process goes on
    _append(out, name, worker, {"done": True})


def _claimed(out: Path, name: str, number: int) -> bool:
    """Whether this process is the first that takes a trial: some take a thousand times as long as others."""
    try:
        (out / f"{name}.claims" / str(number)).mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _rehearsed_failure(name: str, number: int) -> None:
    """For a test: DSQ_CHECK_FAILS="raise", "lost", "kill" or "hang" befalls the second trial of each part."""
    how = os.environ.get("DSQ_CHECK_FAILS")
    if not how or number != 1:
        return
    if how in ("raise", "lost"):
        raise RuntimeError(f"{'CUDA error: ' * (how == 'lost')}rehearsed in {name}")
    if how == "kill":
        os.kill(os.getpid(), 9)
    time.sleep(3600)


def _append(out: Path, name: str, worker: int, line: Record) -> None:
    with (out / f"{name}.jsonl").open("a") as file:  # in one write, so that processes may take turns
        file.write(json.dumps({"worker": worker, **line}) + "\n")


def _lines(out: Path, name: str) -> list[Record]:
    path = out / f"{name}.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []  # what is being written has no end yet
    return [json.loads(line) for line in whole]


def _last(out: Path, name: str, worker: int) -> Record:
    """The line that a process wrote last, or that was written when it was started."""
    return [line for line in _lines(out, name) if line["worker"] == worker][-1]


def _rows(out: Path, name: str) -> list[Record]:
    return [line for line in _lines(out, name) if "name" in line]


def _unfinished(out: Path, name: str) -> set[int]:
    return set(range(_workers(name))) - {line["worker"] for line in _lines(out, name) if "done" in line}


# ---- the page


def report(out: Path) -> str:
    """One page of all results, dated, with the device's name."""
    machines = sorted({row["machine"] for name in PARTS for row in _rows(out, name) if "machine" in row})
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    page = [f"# GPU check, {date.today().isoformat()}", "", f"{'; '.join(machines) or 'nothing ran'}; {versions}"]
    for name in PARTS:
        rows = _rows(out, name)
        if not rows:
            page += ["", f"## {name}: not run"]
            continue
        failed = [row for row in rows if "error" in row or row.get("disagree")]
        open_end = ", not finished" if _unfinished(out, name) else ""
        page += ["", f"## {name}: {len(rows)} rows, {len(failed)} failed{open_end}", ""]
        shown = failed if all("disagree" in row or "error" in row for row in rows) else rows
        names = dict.fromkeys(key for row in shown for key in row if key not in ("machine", "seconds", "worker"))
        page += [table([{name: row.get(name) for name in names} for row in shown])] if shown else []
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    sys.exit(main())
