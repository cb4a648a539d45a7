"""Memory of a training step of six blocks: what the layers stash, and the peak as the operating system sees it.

A process for each precision, since freed memory that stays with a process would hide the next one's peak. For the same
reason glibc is told to hand freed blocks back (MALLOC_MMAP_THRESHOLD_): by default it keeps them, fragmented, and the
resident peak of a step then says little of what was in use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import dsq
from analysis.models import encoder
from dsq.command.files import write_text
from dsq.command.table import as_csv, table

BATCH, LENGTH, WIDTH = 16, 128, 512
PRECISIONS = ("[32,32,32,32]", "[16,4,4,16]", "[4,4,4,16]", "[2,2,2,16]")


def run(out: Path) -> None:
    """Print the table and write it to ``out``/stash.csv."""
    rows = []
    for precision in PRECISIONS:
        command = [sys.executable, "-m", "analysis.bench.stash", precision]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        rows.append(json.loads(child.stdout))
    for figure in ("stash MiB", "peak MiB"):
        for row in rows:
            row[f"{figure} saved"] = rows[0][figure] - row[figure]
    print(f"six blocks, d {WIDTH}, {BATCH * LENGTH} tokens, forward and backward")
    print(table(rows, {name: "" if name == "precision" else ".1f" for name in rows[0]}))
    write_text(out / "stash.csv", as_csv(rows, ".3f"))
    print(f"written: {out / 'stash.csv'}")


def measured(precision: str) -> dict[str, str | float]:
    """Stash and peak resident memory of one step at ``precision``, in this process, in MiB."""
    torch.manual_seed(0)
    model = dsq.convert(encoder(sdpa=True), dsq.DSQConfig(levels=(dsq.Precision.parse(precision),)))
    model(torch.randn(1, 16, WIDTH)).sum().backward()  # threads, scratch and gradients are there before
    x = torch.randn(BATCH, LENGTH, WIDTH)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    model(x).sum().backward()
    peak = _resident("VmHWM") - before
    stash = dsq.stash.measure(lambda: model(x).sum()).nbytes / 2**20
    return {"precision": precision, "stash MiB": stash, "peak MiB": peak}


def _resident(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
