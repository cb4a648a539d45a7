"""Memory and time of a training step of a GPT in this process, which process.py starts for one row."""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.bench.process import Case
from analysis.models import encoder
from analysis.timing import host_clock
from dsq.stash.meter.resident import resident

LEVELS = "[8,4,4,8]"
WARM = 2  #: steps that are not timed: caches exist after them, and gact has chosen its bits


class GPT(nn.Module):
    """Pre-LN decoder; ``around`` calls a block with its input."""

    def __init__(self, size: tuple[int, ...], around: Callable[..., Tensor] | None) -> None:
        super().__init__()
        blocks, width, tokens, vocabulary = size
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        *made, self.norm = encoder(blocks, width, max(1, width // 64), 4 * width, sdpa=True, causal=True)
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.around, self.logits = around, True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        x = self.norm(x)
        return self.head(x) if self.logits else x


def training(case: Case) -> tuple[Callable[[], Tensor], nn.Module]:
    """The loss of a batch, and the model."""
    parts = case.setup.split(" + ")
    checkpointed: dict[str, Callable[..., Tensor]] = {
        "checkpoint": partial(checkpoint, use_reentrant=False),
        "packed checkpoints": dsq.stash.packed_checkpoint,
    }
    model = GPT(case.size, next((checkpointed[part] for part in parts if part in checkpointed), None))
    model.logits = case.loss == "usual"
    if case.setting == "late":
        dsq.give_memory_back()
    if "linears" in parts or "whole" in parts:
        dsq.convert(model, dsq.DSQConfig(levels=LEVELS, stash="all" if "whole" in parts else "linears", exclude="head"))
    for policy in {"mesa", "gact"}.intersection(parts):
        dsq.stash.apply(model, policy)
    ids, targets = torch.randint(case.size[-1], (2, case.batch, case.size[2]))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in parts):
            y = model(ids).flatten(0, 1)
            if model.logits:
                return F.cross_entropy(y, targets.flatten())
            options = nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(y, model.head.weight, targets.flatten(), options=options)

    return loss, model


def measure(case: Case) -> dict[str, float]:
    """MiB above the state before the first step (parameters, AdamW's moments and the batch exist): the resident set's
    high-water mark, and what malloc has given out between forward and backward. Besides, MiB of the whole process at
    that mark, and the median of the seconds of a step: of CPU time on one thread.
    """
    if case.setting != "late":
        dsq.give_memory_back(case.setting == "first")
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    loss_of_batch, model = training(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    held = 0

    def step() -> None:
        nonlocal held
        loss = loss_of_batch()
        held = _given_out()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments
    optimizer.zero_grad()
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, given_out = resident()["resident"], _given_out()
    clock = host_clock()
    seconds = [clock(step, 1) for _ in range(WARM + case.steps)][WARM:]
    peak = resident()["peak"]
    mib = {"above MiB": peak - before, "held MiB": held - given_out, "process MiB": peak}
    return {name: nbytes / 2**20 for name, nbytes in mib.items()} | {"seconds": median(seconds)}


class _MallInfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


def _given_out() -> int:
    """Bytes that glibc's malloc has given out and not got back (2.33 and later; elsewhere 0)."""
    with suppress(AttributeError):
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _MallInfo
        found = mallinfo2()
        return int(found.field4 + found.field7)  # hblkhd and uordblks: in mappings of their own, and in heaps
    return 0


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
