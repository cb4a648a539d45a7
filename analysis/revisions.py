"""This tree against another checkout, bit for bit or in time.

    python -m analysis.revisions OTHER_CHECKOUT           the bits; exit status 1 if any differ
    python -m analysis.revisions OTHER_CHECKOUT --times   seconds a call, in alternating processes

Use it before and after a change that should change no number. Both trees need their kernels built (python setup.py
build_ext --inplace); the cases are always this tree's, and use public names of dsq alone.

Bits: every case is a digest of all tensors that it makes, from one seed, on one thread and on two. All NaN count as
one, and an error is recorded as its type. The first kernel that fits multiplies (DSQ_GEMM).

Times: a round starts one process for this tree and two for the other, in an order that moves on by one each round. A
ratio is the median over the rounds of (this tree's least time of several turns / the other's). The other tree's second
process gives its ratio to itself: what lies within that spread is noise.
"""

import copy
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis import ROOT
from analysis.attach import attach
from analysis.models import encoder, resnet20

PROG = "python -m analysis.revisions"
Found = Iterator[tuple[str, Any]]  #: tensors and numbers by name
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# ---- bits ----

#: shapes and axes; the last are divided between threads
PLACES = (((257,), -1), ((7, 33), 0), ((64, 128), 1), ((3, 18, 40), 1), ((150, 1027), 0), ((150, 1027), 1))
FORMATS = {
    "bfp": ["bfp:bits=2", "bfp:bits=3,box=5", "bfp:bits=4", "bfp:bits=8,box=32", "bfp:bits=16", "bfp:bits=17,box=100"],
    "sbfp": [f"sbfp:bits={bits},box=16" for bits in (2, 3, 4, 8)],
    "snvint": [f"snvint:bits={bits},box=16" for bits in (2, 3, 4, 6)],
    "fixed": [f"fixed:bits={bits}" for bits in (2, 4, 9, 16, 24)] + ["fixed:bits=8,fraction_bits=-3"],
}


def _pack(formats: list[str]) -> Found:
    from dsq.formats import parse_format

    for text, (shape, dim), dtype, seed in product(formats, PLACES, DTYPES, (None, 7)):
        x, fmt = torch.randn(shape).to(dtype), parse_format(text)
        how: dict[str, Any] = {} if seed is None else {"rounding": "stochastic", "seed": seed}
        packed, name = dsq.pack(x, fmt, dim, **how), f"{text} {shape} {dim} {dtype} {seed}"
        yield f"{name} quantize", dsq.quantize(x, fmt, dim, **how)
        yield from ((f"{name} codes", packed.codes), (f"{name} scales", packed.scales))
        yield from ((f"{name} unpack", packed.unpack()), (f"{name} as bfloat16", packed.unpack(torch.bfloat16)))


LEVELS = [f"[{q}]" for q in ("2,2,2,16", "4,4,4,8", "4,3,3,8", "8,4,4,8", "16,4,4,16", "3,5,7,16", "32,4,4,32")]
LEVELS += ["[32,32,32,32]", "[4,32,8,16]"]
STYLES: list[dict[str, Any]] = [{}, {"rounding": "stochastic"}, {"box_axis": "last", "box": 8}, {"units": "float32"}]
STYLES += [{"format": "bfp", "box": 5}, {"format": "sbfp"}, {"format": "fixed"}]
#: leading dimensions of x, inputs, outputs
SIZES = (((33,), 48, 40), ((2, 17), 70, 31), ((128,), 128, 64), ((1,), 16, 16), ((3, 4, 25), 96, 136))


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
            for what, tensor in (("y", y), ("dx", x.grad), ("dw", layer.weight.grad), ("db", layer.bias.grad)):
                yield f"{name} {what}", tensor


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2)


#: makers of a model and the shape of its input
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (lambda: encoder(2, 48, 4, 96, dropout=0.1), (4, 20, 48)),
    "sdpa": (lambda: encoder(2, 48, 4, 96, sdpa=True), (4, 20, 48)),
    "torch encoder": (_torch_encoder, (4, 20, 48)),
    "resnet": (lambda: resnet20((8, 12, 16)), (8, 3, 12, 12)),
}
#: as analysis/attach.py names them
SETUPS: tuple[str, ...] = ("[4,3,3,8]", "[8,4,4,8] whole", "[4,3,3,8] fixed stochastic", "bfloat16", "bfp 4", "bfp 2")
SETUPS += ("mesa", "gact 4", "gact 4 CB1", "gact 2 of bfp", "selective", "selective + bfp 4", "wtacrs 0.3")
SETUPS += ("wtacrs 0.5 products + bfp 4", "checkpoint + bfp 4")


def _train(setup: str) -> Found:
    """Four steps, plain and under autocast: bytes, loss and gradients; an evaluation."""
    for (name, (make, shape)), autocast in product(MODELS.items(), (False, True)):
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        attach(model, setup)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(4):
            torch.manual_seed(step)
            at, losses = f"{name}{' autocast' * autocast} {step}", list[Tensor]()
            forward = partial(_loss, model, x, autocast, losses)
            if step == 3:  # gact adapts in the second step: what is held meanwhile differs from run to run
                yield f"{at} bytes", dsq.stash.measure(forward).nbytes
            else:
                forward()
            losses[-1].backward()
            yield f"{at} loss", losses[-1]
            yield f"{at} gradients", torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            yield f"{at} evaluation", model.eval()(x)


def _loss(model: nn.Module, x: Tensor, autocast: bool, losses: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses.append(model(x).float().square().mean())
    return losses[-1]


CASES: dict[str, Callable[[], Found]] = {
    **{f"pack {name}": partial(_pack, formats) for name, formats in FORMATS.items()},
    **{f"linear {style or 'default'}": partial(_linear, style) for style in STYLES},
    **{f"train {name}": partial(_train, name) for name in SETUPS},
}


def digests(only: str) -> dict[str, dict[str, str]]:
    """Digests of all cases whose names ``only`` is found in: case -> what was computed -> SHA-256 or number."""
    warnings.simplefilter("ignore")  # a q3 under 16 is recorded too
    found = {}
    for threads, (name, case) in product((1, 2), CASES.items()):
        if re.search(only, name) and (threads == 1 or name.startswith("pack")):  # two are slow on a busy machine
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            parts = found[f"{name}, {threads} threads"] = dict[str, str]()
            try:
                parts.update((what, _digest(thing)) for what, thing in case())
            except Exception as error:
                parts["error"] = f"raised {type(error).__name__}: {error}"
    return found


def _digest(thing: Tensor | int | None) -> str:
    """SHA-256 of dtype, shape and values; a number stays itself."""
    if not isinstance(thing, Tensor):
        return str(thing)
    values = thing.detach().contiguous()
    if values.is_floating_point():
        values = torch.where(values.isnan(), math.nan, values)
    head = f"{values.dtype} {tuple(values.shape)} ".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def compare_bits(other: Path, only: str) -> int:
    """Print what differs, a line a case; the number of cases that do."""
    if not any(re.search(only, case) for case in CASES):
        raise ValueError(f"--only {only!r} finds no case; cases are {', '.join(CASES)}")
    old, new = (json.loads(_run(tree, "digests", only)) for tree in (other, ROOT))
    differing = [case for case in new if old[case] != new[case]]
    for case in new:
        if error := new[case].get("error"):
            print(f"{case}: {error}")
    for case in differing:
        parts = [part for part in old[case] | new[case] if old[case].get(part) != new[case].get(part)]
        first = f"{parts[0]}: {old[case].get(parts[0], 'none')[:60]} -> {new[case].get(parts[0], 'none')[:60]}"
        print(f"{case}: {len(parts)} of {len(old[case] | new[case])} differ, first {first}")
    print(f"{len(differing)} of {len(new)} cases differ, {sum(map(len, new.values())):,} digests")
    return len(differing)


# ---- times ----

#: gact with uniform bits, which do not change meanwhile
TIMED = ("plain", "[8,4,4,8]", "[8,4,4,8] whole", "bfp 4", "mesa", "gact 4 uniform")


def _step(model: nn.Module, x: Tensor, setup: str) -> Callable[[], None]:
    """Forward and backward of a copy with a setup."""
    held = copy.deepcopy(model)
    attach(held, setup)
    return lambda: held(x).square().mean().backward()


def seconds() -> dict[str, float]:
    """The least seconds of a call: steps of six blocks at two widths, of one small layer; quantise and pack."""
    from analysis.timing import in_turns, keep_freed_memory

    keep_freed_memory()
    torch.manual_seed(0)
    calls: dict[str, Callable[[], object]] = {}
    for what, model, x, setups in (
        ("d 512", encoder(6, 512, 8, 2048, sdpa=True), torch.randn(8, 128, 512), TIMED),
        ("d 128", encoder(6, 128, 4, 512, sdpa=True), torch.randn(16, 64, 128), TIMED),
        ("layer 64 x 64", nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True), TIMED[:3]),
    ):
        calls |= {f"{what}: {setup}": _step(model, x, setup) for setup in setups}
    x = torch.randn(2048, 512)
    for function, dim in product((dsq.quantize, dsq.pack), (-1, 0)):
        calls[f"{function.__name__} 2^20, dim {dim}"] = partial(function, x, dsq.BFP(4), dim)
    return {name: min(taken) for name, taken in in_turns(calls, 4, warm=2).items()}


def compare_times(other: Path, rounds: int) -> None:
    """Print a row a call: milliseconds, the ratio, and the spread of the ratio and of the other tree's to itself."""
    from dsq.command import table

    times: list[list[dict[str, float]]] = [[], [], []]
    for turn in range(rounds):
        for place in range(3):
            who = (turn + place) % 3
            times[who].append(json.loads(_run((ROOT, other, other)[who], "seconds")))
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    new, old, again = times
    rows: list[dict[str, Any]] = []
    for name in old[0]:
        row: dict[str, Any] = {"call": name}
        row |= {label: 1e3 * median(t[name] for t in tree) for label, tree in (("old ms", old), ("new ms", new))}
        for label, tree in (("new/old", new), ("old/old", again)):
            ratios = [mine[name] / base[name] for mine, base in zip(tree, old, strict=True)]
            row |= {label: median(ratios), f"{label} spread": f"{min(ratios):.3f}-{max(ratios):.3f}"}
        rows.append(row)
    print(table(rows, dict.fromkeys(rows[0], ".3f") | {"call": ""}))


# ---- processes ----


def _run(tree: Path, what: str, *arguments: str) -> str:
    """JSON of ``what(*arguments)``, a function of this file, in a process whose dsq is that of ``tree``."""
    code = "import dsq, sys, json; sys.path.insert(0, sys.argv[1]); import analysis.revisions as it; "
    code += "print(json.dumps(getattr(it, sys.argv[2])(*sys.argv[3:])))"
    fixed = {"DSQ_GEMM": "the first"} if what == "digests" else {"OMP_NUM_THREADS": "1", "DSQ_ALLOCATOR": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(ROOT), what, *arguments],
        env={**os.environ, **fixed, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the process with the dsq of {tree} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.splitlines()[-1]


def main(argv: list[str] | None = None) -> int:
    from dsq.command import OneLineParser, count, guarded

    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("other", type=Path, help="root of the other checkout, its kernels built")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases of the bits (default: all)")
    parser.add_argument("--times", action="store_true", help="time the two trees instead")
    parser.add_argument("--rounds", type=count, default=5, help="of --times (default: %(default)s)")
    given = parser.parse_args(argv)

    def work() -> None:
        other = given.other.resolve()
        if not (other / "dsq").is_dir():
            raise ValueError(f"{given.other}: no checkout of dsq")
        if given.times:
            compare_times(other, given.rounds)
        elif compare_bits(other, given.only):
            raise SystemExit(1)

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
