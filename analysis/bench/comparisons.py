"""Races on this CPU: kernels against copies, and training steps.

A contestant of a race of steps does what its name says (analysis/models.py); "fused": inside dsq.fused_attention.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

import dsq
from analysis.models import attach, encoder
from analysis.timing import Call, Comparison, compare
from dsq import recipes
from dsq.formats import BFP, NAMED, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.cpu.backend import backend as cpu_backend
from dsq.kernels.cpu.library import library
from dsq.precision import DEFAULT_LEVELS
from dsq.process_memory import keep_freed_memory

COLUMNS = 4096
SIZES = (1 << 18, 1 << 22, 1 << 24)  #: values of a layer's tensor, in cache and beyond, and of a large one
AXES = {"columns": -1, "rows": 0}


def against_copies(rounds: int) -> Iterator[Comparison]:
    """Against cloning the same values: by each instruction set at 4 bits, then other formats by the best of them.

    Raises ValueError without the kernels.
    """
    sets = list(library().instruction_sets())
    if not sets:
        raise ValueError("the native kernels are not built: python setup.py build_ext --inplace")
    keep_freed_memory()
    formats = BFP(8), SignedNVInt(4), FixedPoint(4)
    for size in SIZES:
        x = torch.randn(size // COLUMNS, COLUMNS)
        for isa, fmt in (*((isa, BFP(4)) for isa in sets), *((sets[0], fmt) for fmt in formats)):
            title = f"{fmt} by {isa}, {size:,} float32 values, {torch.get_num_threads()} threads"
            yield compare(title, ("clone", x.clone), operations(isa, x, fmt), rounds)


def operations(isa: str, x: Tensor, fmt: Format) -> dict[str, Call]:
    """Pack, unpack and quantize on both axes, their outputs allocated, as clone's are."""
    calls = dict[str, Call]()
    backend = cpu_backend(isa)
    for axis, dim in AXES.items():
        layout = Layout.of(x.shape, dim)
        codes = backend.pack(x, fmt, layout, None)
        calls[f"pack, {axis}"] = partial(backend.pack, x, fmt, layout, None)
        calls[f"pack stochastic, {axis}"] = partial(backend.pack, x, fmt, layout, 1)
        calls[f"unpack, {axis}"] = partial(backend.unpack, *codes, fmt, layout, x.dtype)
        calls[f"quantize, {axis}"] = partial(backend.quantize, x, fmt, layout, None, x.dtype)
        calls[f"quantize stochastic, {axis}"] = partial(backend.quantize, x, fmt, layout, 1, x.dtype)
    return calls


# ---- training steps

Training = tuple[nn.Module, Callable[[nn.Module], Tensor]]  #: a model, and the loss of its batch
AUTOCAST = "bf16 autocast"
LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]", "[4,4,4,8]", "[4,3,3,8]", "[8,4,4,8]")


def step(name: str, training: Training, warm: int = 0) -> Call:
    """A contestant's forward and backward; gradients are dropped. The model is changed in place."""
    model, loss_of = training
    attach(model, name)
    attention = dsq.fused_attention if "fused" in name else nullcontext

    def run() -> None:
        with attention():
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
                loss = loss_of(model)
            loss.backward()
        model.zero_grad()

    for _ in range(warm):
        run()
    return run


def blocks(width: int = 512, sequences: int = 8, length: int = 128) -> Training:
    """Six pre-LN blocks; the loss is a mean of squares."""
    torch.manual_seed(0)
    heads = 8 if width == 512 else 4
    x = torch.randn(sequences, length, width)
    return encoder(6, width, heads, 4 * width, sdpa=True), partial(_squares, x)


def _squares(x: Tensor, model: nn.Module) -> Tensor:
    return model(x).float().square().mean()


def _race(title: str, training: Training, names: Sequence[str], rounds: int, warm: int = 0) -> Comparison:
    """The first name is the baseline."""
    keep_freed_memory()
    calls = {name: step(name, copy.deepcopy(training), warm) for name in names}
    gc.freeze()  # a full collection goes through all that transformers made: a seventh of the step in which it falls
    first = names[0]
    return compare(f"{title}, {torch.get_num_threads()} threads", (first, calls.pop(first)), calls, rounds)


def six_blocks(rounds: int) -> Iterator[Comparison]:
    """Six blocks against fp32 at two widths, under stash="all" and autocast."""
    names = ["fp32", AUTOCAST, f"{AUTOCAST} + fused", *LEVELS, f"{LEVELS[-1]} + fused"]
    names += [f"{levels} all" for levels in LEVELS[1:]]
    names += [f"{levels} + autocast" for levels in ("[4,4,4,16]", "[4,4,4,8]", "[8,4,4,8]")]
    more = ["[4,4,4,16] bfp", "[4,4,4,8] bfp", "[4,4,4,16] fixed", "[2,2,2,16] stochastic", "[2,2,2,16] float32"]
    yield _race("six blocks, d 512, 1024 tokens", blocks(), names + more, rounds)
    yield _race("six blocks, d 128, 1024 tokens", blocks(128, 16, 64), names, rounds)


def policies(rounds: int) -> Iterator[Comparison]:
    """Compare the policies that pack all saved tensors of a model; at width 128 a policy weighs more."""
    default = str(DEFAULT_LEVELS[0])
    names = ["fp32", default, f"{default} all", "bfp 4", "mesa", "gact 4 uniform"]
    yield _race("six blocks, d 512, 1024 tokens", blocks(), names, rounds, warm=2)
    yield _race("six blocks, d 128, 1024 tokens", blocks(128, 16, 64), names, rounds, warm=25)


def formats(rounds: int) -> Iterator[Comparison]:
    """A linear layer's step in every format by name and every recipe, against fp32's; then quantizing its input."""
    names = [*{fmt: name for name, fmt in reversed(NAMED.items())}.values()]  # of formats with two names the first
    levels = [f"[{bits},{bits},{bits},{bits}] {family}" for family in ("bfp", "snvint", "fixed") for bits in (4, 8)]
    contestants = dict.fromkeys(["fp32", AUTOCAST, *levels, *names, *recipes.names()])
    yield _race("linear layer, 1024 features, 4096 tokens", layer(), [*contestants], rounds)
    x = torch.randn(4096, 1024)
    calls: dict[str, Call] = {name: partial(dsq.quantize, x, name) for name in ("bfp4", "snvint4", "fixed4", *names)}
    title = f"quantize {x.numel():,} float32 values, {torch.get_num_threads()} threads"
    yield compare(title, ("clone", x.clone), calls, rounds)


def layer(features: int = 1024, tokens: int = 4096) -> Training:
    """A linear layer whose input wants a gradient; the loss is a sum of its results with random factors."""
    torch.manual_seed(0)
    x, dy = torch.randn(tokens, features, requires_grad=True), torch.randn(tokens, features)
    return nn.Sequential(nn.Linear(features, features)), lambda model: (model(x) * dy).sum()
