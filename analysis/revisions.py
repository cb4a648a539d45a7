"""This tree against another checkout, bit for bit: python -m analysis.revisions OTHER_CHECKOUT

For a change that should change no number; it exits 1 if any differs. Both trees need their kernels built. What is
trained is always this tree's, by public names of dsq. All NaN count as one; an error counts by its type.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsq
from analysis import ROOT
from analysis.models import attach, encoder, resnet20
from dsq.command import OneLineParser, guarded

#: names of analysis/models.py
LEVELS = ("[2,2,2,16]", "[4,3,3,8]", "[8,4,4,8]", "[16,4,4,16]")
SETUPS = [f"{levels}{more}" for levels in LEVELS for more in ("", " stochastic", " float32", " bfp", " fixed")]
SETUPS += ["bf16 + [8,4,4,8]", "[8,4,4,8] whole", "mesa", "gact 4", "gact 4 CB1", "selective + bfp 4", "wtacrs 0.3"]
SETUPS += ["checkpoint + bfp 4"]
#: models, and the shapes of their inputs
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "encoder": (partial(encoder, 2, 48, 4, 96, 0.1), (4, 20, 48)),
    "resnet20": (partial(resnet20, (8, 12, 16)), (8, 3, 12, 12)),
    "linear layer": (lambda: nn.Sequential(nn.Linear(70, 31)), (2, 17, 70)),
}


def trained(setup: str) -> Iterator[tuple[str, Any]]:
    """Losses and gradients of four steps, plain and under autocast, and the bytes that a later forward keeps, each with
    its name."""
    for (model_name, (make, shape)), autocast in product(MODELS.items(), (False, True)):
        model, name = make(), f"{model_name}{' autocast' * autocast}"
        attach(model, setup)
        x = torch.randn(shape, dtype=next(model.parameters()).dtype)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            yield from ((f"{name} {step} {n}", made) for n, made in enumerate((loss, *gradients)))
        yield f"{name} bytes", dsq.stash.measure(partial(model, x)).nbytes


def digests() -> None:
    """Print a line for each thing that a training under each setup makes: the setup, what, and its digest."""
    torch.set_num_threads(1)
    for setup in SETUPS:
        torch.manual_seed(0)
        try:
            for what, thing in trained(setup):
                print(f"{setup}\t{what}\t{digest(thing)}")
        except Exception as error:
            print(f"{setup}\terror\t{type(error).__name__}")


def digest(thing: torch.Tensor | int | None) -> str:
    """SHA-256 of dtype, shape and values; a number, or None, stays itself."""
    if not isinstance(thing, torch.Tensor):
        return str(thing)
    values = thing.detach().contiguous()
    if values.is_floating_point():
        values = torch.where(values.isnan(), math.nan, values)
    head = f"{values.dtype} {tuple(values.shape)} ".encode()
    return hashlib.sha256(head + bytes(values.reshape(-1).view(torch.uint8).numpy())).hexdigest()


def compare(other: Path) -> int:
    """Print what differs first under each setup where anything does, and return how many these are."""
    if not (other / "dsq").is_dir():
        raise ValueError(f"{other}: no checkout of dsq")
    old, new = (_digests_of(tree) for tree in (other.resolve(), ROOT))
    first = {line.split("\t")[0]: line for line in sorted({*old} ^ {*new}, reverse=True)}
    for line in sorted(first.values()):
        print(line.expandtabs(1))
    print(f"{len(first)} setups differ, of {len(new):,} digests")
    return len(first)


def _digests_of(tree: Path) -> list[str]:
    """Return what ``digests`` prints in a process whose dsq is that of ``tree``, by the first kernel that fits."""
    code = f"import dsq, sys; sys.path.insert(0, {str(ROOT)!r}); import analysis.revisions as it; it.digests()"
    environment = {**os.environ, "DSQ_GEMM": "the first", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]  # few bits warn
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the process with the dsq of {tree} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.splitlines()


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.revisions", description=__doc__)
    parser.add_argument("other", type=Path, help="root of the other checkout, its kernels built")
    given = parser.parse_args(argv)
    return guarded(parser.prog, lambda: sys.exit(bool(compare(given.other))))


if __name__ == "__main__":
    sys.exit(main())
