"""This tree against another checkout, bit for bit: python -m analysis.revisions OTHER_CHECKOUT

For a change that should change no number; it exits 1 if any differs. Both trees need their kernels built. The cases are
always this tree's, by public names of dsq. All NaN count as one; an error counts by its type.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dsq
from analysis import ROOT
from analysis.models import attach, encoder, resnet20
from dsq.command import OneLineParser, guarded

Found = Iterator[tuple[str, Any]]  #: tensors and numbers by name
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLACES = (((257,), -1), ((7, 33), 0), ((64, 128), 1), ((3, 18, 40), 1), ((150, 1027), 0), ((150, 1027), 1))
FORMATS = [f"{name}:bits={bits}" for name in ("bfp", "sbfp", "snvint", "fixed") for bits in (2, 3, 4, 8, 17)]
LEVELS = ("[2,2,2,16]", "[4,4,4,8]", "[4,3,3,8]", "[8,4,4,8]", "[16,4,4,16]", "[3,5,7,16]", "[32,32,32,32]")
STYLES: list[dict[str, Any]] = [{}, {"rounding": "stochastic"}, {"units": "float32"}, {"format": "bfp"}]
SIZES = (((33,), 48, 40), ((2, 17), 70, 31), ((1,), 16, 16), ((3, 4, 25), 96, 136))  #: leading, inputs, outputs
MODELS = ((partial(encoder, 2, 48, 4, 96, 0.1), (4, 20, 48)), (partial(resnet20, (8, 12, 16)), (8, 3, 12, 12)))
SETUPS = ["[4,3,3,8]", "[8,4,4,8] whole", "mesa", "gact 4", "gact 4 CB1", "selective + bfp 4"]
SETUPS += ["wtacrs 0.3", "checkpoint + bfp 4"]


def _pack(text: str) -> Found:
    fmt = dsq.formats.parse_format(text)
    for (shape, dim), dtype, seed, threads in product(PLACES, DTYPES, (None, 7), (1, 2)):
        torch.set_num_threads(threads)
        x, how = torch.randn(shape).to(dtype), dict[str, Any]({"rounding": "stochastic", "seed": seed} if seed else {})
        packed, name = dsq.pack(x, fmt, dim, **how), f"{shape} {dim} {dtype} {seed} {threads}"
        yield from ((f"{name} quantize", dsq.quantize(x, fmt, dim, **how)), (f"{name} unpack", packed.unpack()))
        yield from ((f"{name} codes", packed.codes), (f"{name} scales", packed.scales))


def _linear(style: dict[str, Any]) -> Found:
    """Outputs of dsq.Linear and the gradients of its input, weight and bias; twice, the second time warm."""
    for levels, (lead, inner, outer), dtype, autocast in product(LEVELS, SIZES, DTYPES[:3], (False, True)):
        layer = dsq.Linear(inner, outer, dtype=dtype)
        dsq.set_level(layer, dsq.DSQConfig(levels=levels, **style), 0)
        x = torch.randn(*lead, inner).to(dtype).requires_grad_()
        for turn in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = layer(x)
            y.backward(torch.randn(y.shape).to(y.dtype))
            name = f"{levels} {lead} {inner} {outer} {dtype}{' autocast' * autocast} {turn}"
            yield from ((f"{name} {n}", it) for n, it in enumerate((y, x.grad, *(p.grad for p in layer.parameters()))))


def _train(setup: str) -> Found:
    """Losses and gradients of four steps, plain and under autocast, and the bytes that a later forward keeps."""
    for (make, shape), autocast in product(MODELS, (False, True)):
        model, x = make(), torch.randn(shape)
        attach(model, setup)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            name = f"{make.func.__name__}{' autocast' * autocast} {step}"
            yield from ((f"{name} {n}", made) for n, made in enumerate((loss, *gradients)))
        yield f"{name} bytes", dsq.stash.measure(partial(model, x)).nbytes


def digests() -> None:
    """Print a line for each thing that a case makes: the case, what, and its digest."""
    cases = {f"pack {name}": _pack(name) for name in FORMATS} | {f"train {name}": _train(name) for name in SETUPS}
    for case, found in (cases | {f"linear {style or 'default'}": _linear(style) for style in STYLES}).items():
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            print(*(f"{case}\t{what}\t{digest(thing)}" for what, thing in found), sep="\n")
        except Exception as error:
            print(f"{case}\terror\t{type(error).__name__}")


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
    """Print what differs first in each case that differs, and return how many do."""
    if not (other / "dsq").is_dir():
        raise ValueError(f"{other}: no checkout of dsq")
    old, new = (_digests_of(tree) for tree in (other.resolve(), ROOT))
    first = {line.split("\t")[0]: line for line in sorted({*old} ^ {*new}, reverse=True)}
    for line in sorted(first.values()):
        print(line.expandtabs(1))
    print(f"{len(first)} cases differ, of {len(new):,} digests")
    return len(first)


def _digests_of(tree: Path) -> list[str]:
    """Return what ``digests`` prints in a process whose dsq is that of ``tree``, by the first kernel that fits."""
    code = f"import dsq, sys; sys.path.insert(0, {str(ROOT)!r}); import analysis.revisions as it; it.digests()"
    environment = {**os.environ, "DSQ_GEMM": "the first", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]  # a q3 under 16 warns
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
