"""What analysis.revisions.record_bits records, by the public names of dsq alone: digests as JSON.

Quantise and pack over formats, axes, dtypes and roundings; outputs and gradients of linear layers; the training of
converted models; and of every stash policy gradients and bytes. Values full of edges are left to the conformance suite
(kernels/conformance). Each case starts from one seed, so that cases can be added or taken out. Any NaN counts as any
other. A case that raises is recorded as its error.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis.models import encoder, resnet20
from dsq.formats import parse_format

Found = Mapping[str, Tensor | int | None]
Case = tuple[str, Callable[[], Found]]  #: its name, and what computes it
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(_: list[str]) -> None:
    """Print {case: digest}: every case at one thread, and some at two, which a busy machine slows thirtyfold."""
    warnings.simplefilter("ignore")  # a q3 under 16 is recorded too
    found: dict[str, str] = {}
    for threads, step in ((1, 1), (2, 17)):
        torch.set_num_threads(threads)
        for part in (packing, linears, training, stashes):
            for name, run in list(part())[::step]:
                found |= {f"threads {threads}/{part.__name__}/{name}: {k}": v for k, v in _digests(run).items()}
    print(json.dumps(found, indent=0))


def _digests(run: Callable[[], Found]) -> dict[str, str]:
    torch.manual_seed(0)
    try:
        return {what: _digest(thing) for what, thing in run().items()}
    except Exception as error:
        return {"error": f"raised {type(error).__name__}: {error}"}


def _digest(thing: Tensor | int | None) -> str:
    """SHA-256 of dtype, shape and values; a number stays itself."""
    if not isinstance(thing, Tensor):
        return str(thing)
    values = thing.detach().contiguous()
    if values.is_floating_point():
        values = torch.where(values.isnan(), math.nan, values)
    head = f"{values.dtype} {tuple(values.shape)} ".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


# ---- quantise, pack, unpack ----

FORMATS = (
    *(dsq.BFP(bits) for bits in (*range(2, 18), 32)),
    *(dsq.BFP(bits, box) for bits, box in product((2, 3, 4, 8, 16), (5, 8, 32, 100))),
    *(dsq.FixedPoint(bits) for bits in (*range(2, 17), 24)),
    *(dsq.FixedPoint(bits, point) for bits, point in ((2, 0), (4, 2), (8, -3), (8, 4), (16, 10), (16, 100))),
    dsq.Identity(),
    *(f"sbfp:bits={bits},box=16" for bits in (2, 3, 4, 8)),  # those that dsq does not export
    *(f"snvint:bits={bits},box=16" for bits in (2, 3, 4, 6)),
)
#: shapes and axes; the last are divided between threads
PLACES = (((257,), -1), ((7, 33), 0), ((64, 128), 1), ((3, 18, 40), 1), ((150, 4099), 0), ((150, 4099), 1))


def packing() -> Iterator[Case]:
    for fmt, (shape, dim), dtype, seed in product(FORMATS, PLACES, DTYPES, (None, 7)):
        name = f"{fmt!r}/{shape} dim {dim}/{dtype}/seed {seed}"
        yield name, partial(_pack, fmt, shape, dim, dtype, seed)


def _pack(fmt: Any, shape: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int | None) -> Found:
    x = torch.randn(shape).to(dtype)
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    how: dict[str, Any] = {} if seed is None else {"rounding": "stochastic", "seed": seed}
    packed = dsq.pack(x, fmt, dim, **how)
    found = {"quantize": dsq.quantize(x, fmt, dim, **how), "codes": packed.codes, "scales": packed.scales}
    return found | {"nbytes": packed.nbytes, "unpack": packed.unpack(), "as bfloat16": packed.unpack(torch.bfloat16)}


# ---- linear layers ----

LEVELS = [f"[{widths}]" for widths in ("2,2,2,16", "4,4,4,8", "4,4,4,16", "8,8,8,16", "16,4,4,16", "3,5,7,16")]
LEVELS += ["[4,4,4,4]", "[32,32,32,32]", "[32,4,4,32]", "[4,32,8,16]"]
STYLES: list[dict[str, Any]] = [{"box": 16}, {"box": 8}, {"box": 5}, {"format": "bfp"}]
STYLES += [{"format": "sbfp"}, {"format": "fixed"}, {"format": "fixed", "fraction_bits": 3}]
HOW = {"box_axis": ("contraction", "last"), "units": ("exact", "float32"), "rounding": ("nearest", "stochastic")}
#: leading dimensions of x, K and N
SIZES = (((33,), 48, 40), ((2, 17), 70, 31), ((128,), 128, 64), ((1,), 16, 16), ((3, 4, 25), 96, 136))


def linears() -> Iterator[Case]:
    for how, levels, style, size in product(product(*HOW.values()), LEVELS, STYLES, SIZES):
        options = dict(zip(HOW, how, strict=True), levels=levels) | style
        yield f"{levels}/{style}/{size}/{' '.join(how)}", partial(_linear, options, *size)
    for levels, dtype, autocast in product(LEVELS[:5], DTYPES, (False, True)):
        name = f"{levels}/{dtype}{', autocast' * autocast}"
        yield name, partial(_linear, {"levels": levels}, (130,), 256, 192, dtype, autocast)


def _linear(
    options: dict[str, Any],
    lead: tuple[int, ...],
    inner: int,
    outer: int,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> Found:
    """y of a dsq.Linear and the gradients of its input, weight and bias."""
    layer = dsq.Linear(inner, outer, dtype=dtype)
    dsq.set_level(layer, dsq.DSQConfig(**options), 0)
    x = torch.randn(*lead, inner).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


# ---- models ----


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2)


#: makers of a model and the shape of its input
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (lambda: encoder(2, 48, 4, 96, dropout=0.1), (4, 20, 48)),
    "sdpa": (lambda: encoder(2, 48, 4, 96, sdpa=True), (4, 20, 48)),
    "torch encoder": (_torch_encoder, (4, 20, 48)),
    "convolutions": (lambda: resnet20((8, 12, 16)), (8, 3, 12, 12)),
}
TRAININGS: list[dict[str, Any]] = [{}, {"format": "fixed"}, {"rounding": "stochastic"}, {"units": "float32"}]
TRAININGS += [{"box_axis": "last", "box": 8}, {"exclude": "linear1|fc1", "eval_full_precision": True}]


def training() -> Iterator[Case]:
    for model, options, autocast in product(("blocks", "torch encoder"), TRAININGS, (False, True)):
        name = f"{model}/{options}{', autocast' * autocast}"
        yield name, partial(_train, model, options, autocast)


def _train(name: str, options: dict[str, Any], autocast: bool) -> Found:
    """Four steps, two at each level, then an evaluation."""
    make, shape = MODELS[name]
    config = dsq.DSQConfig(**options)
    model, x, found = dsq.convert(make(), config), torch.randn(shape), dict[str, Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        dsq.set_level(model, config, step // 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"loss {step}": loss, f"parameters {step}": _flat(model.parameters())}
    with torch.no_grad():
        return found | {"evaluation": model.eval()(x)}


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([torch.empty(0) if t is None else t.detach().flatten() for t in tensors])


# ---- stash policies ----

Policies = tuple[tuple[str, dict[str, Any]], ...]
ALONE: list[Policies] = [
    *(((name, {}),) for name in ("bfloat16", "bfp", "mesa", "gact", "selective", "wtacrs", "checkpoint")),
    *((("bfp", given),) for given in ({"bits": 2}, {"bits": 8, "box": 32}, {"rounding": "stochastic", "seed": 3})),
    *((("gact", given),) for given in ({"bits": 2}, {"format": "bfp"}, {"level": "L2"}, {"level": "CB1"})),
    (("mesa", {"groups": 2}),),
    (("wtacrs", {"ratio": 0.5, "products": True}),),
]
TOGETHER: list[Policies] = [
    *(((first, {}), ("bfp", {"bits": 4})) for first in ("wtacrs", "selective", "checkpoint")),
    *((("dsq.convert", {}), (second, {})) for second in ("bfp", "gact", "mesa", "checkpoint", "selective")),
]


def stashes() -> Iterator[Case]:
    for model, policies in product(MODELS, ALONE + TOGETHER):
        yield f"{model}/{policies}", partial(_stash, model, policies)


def _stash(name: str, policies: Policies) -> Found:
    """Three training steps: bytes kept for the backward, loss and gradients of each."""
    make, shape = MODELS[name]
    model, x, found = make(), torch.randn(shape), dict[str, Tensor | int]()
    for policy, options in policies:
        if policy == "dsq.convert":
            dsq.convert(model, dsq.DSQConfig(levels="[4,4,4,16] [16,4,4,16]"))
        else:
            dsq.stash.apply(model, policy, **options)
    for step in range(3):
        torch.manual_seed(step)
        losses: list[Tensor] = []

        def forward(losses: list[Tensor] = losses) -> Tensor:
            losses.append(model(x).square().mean())
            return losses[-1]

        found[f"bytes {step}"] = dsq.stash.measure(forward).nbytes
        losses[-1].backward()
        found |= {f"loss {step}": losses[-1], f"gradients {step}": _flat(p.grad for p in model.parameters())}
        model.zero_grad()
    return found
