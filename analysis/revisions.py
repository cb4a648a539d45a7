"""Digests of what small trainings compute, for a change that should change no number: one checkout against another.

    diff <(cd ONE && python -m analysis.revisions) <(cd OTHER && python -m analysis.revisions)

Both trees need their kernels built. All NaN count as one; an error counts by its type.
"""

import hashlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import dsq
from analysis.models import attach, encoder, resnet20
from dsq.command import OneLineParser, guarded

#: names of analysis/models.py
LEVELS = ("[2,2,2,16]", "[4,3,3,8]", "[8,4,4,8]", "[16,4,4,16]")
SETUPS = [f"{levels}{suffix}" for levels in LEVELS for suffix in ("", " stochastic", " float32", " bfp", " fixed")]
SETUPS += ["bf16 + [8,4,4,8]", "[8,4,4,8] all", "mesa", "gact 4", "checkpoint + gact 4 uniform", "selective + bfp 4"]
SETUPS += ["wtacrs 0.3", "checkpoint + bfp 4"]
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
            yield from ((f"{name} {step} {n}", tensor) for n, tensor in enumerate((loss, *gradients)))
        yield f"{name} bytes", dsq.stash.measure(partial(model, x)).nbytes


def digests() -> None:
    """Print a line for each thing that a training under each setup makes: the setup, what, and its digest."""
    os.environ["DSQ_GEMM"] = "the first"  # that fits: none is timed
    warnings.simplefilter("ignore")  # of few bits
    torch.set_num_threads(1)
    for setup in SETUPS:
        torch.manual_seed(0)
        try:
            for name, thing in trained(setup):
                print(f"{setup}\t{name}\t{digest(thing)}")
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


if __name__ == "__main__":
    parser = OneLineParser(prog="python -m analysis.revisions", description=__doc__)
    parser.parse_args()
    sys.exit(guarded(parser.prog, digests))
