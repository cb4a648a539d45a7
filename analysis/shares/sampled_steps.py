"""Steps for perf to sample: what analysis.shares runs for each tree."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import dsq
from analysis.bench.step import BATCH, LENGTH, WIDTH, converted, step_of
from analysis.models import encoder
from analysis.timing.allocator import keep_freed_memory

#: contestant -> whether it runs under autocast, and how it is converted
CONTESTANTS: dict[str, tuple[bool, dict[str, str]]] = {
    "fp32": (False, {}),
    "bf16 autocast": (True, {}),
    "[4,4,4,16]": (False, {"levels": "[4,4,4,16]"}),
    "[4,4,4,8]": (False, {"levels": "[4,4,4,8]"}),
    "[4,4,4,8], autocast": (True, {"levels": "[4,4,4,8]"}),
    "[16,4,4,16]": (False, {"levels": "[16,4,4,16]"}),
    "[4,4,4,16], whole stash": (False, {"levels": "[4,4,4,16]", "stash": "all"}),
}


def main(arguments: Sequence[str]) -> None:
    """Run a contestant's steps and print the CPU seconds of one; perf is told to start after the first two."""
    name, steps, control = arguments
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    autocast, options = CONTESTANTS[name]
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    if options:
        step = step_of(converted(model, **options), x, autocast, dsq.fused_attention)
    else:
        step = step_of(model, x, autocast)
    step()
    step()
    gc.collect()
    gc.disable()
    Path(control).write_text("enable\n")
    start = time.process_time()  # what else the machine does is left out, as perf leaves it out
    for _ in range(int(steps)):
        step()
    print((time.process_time() - start) / int(steps), flush=True)
    Path(control).write_text("disable\n")
