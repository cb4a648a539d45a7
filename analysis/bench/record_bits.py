"""Digests of what dsq computes, so that one revision can be held against another to the bit.

    python -m analysis.bench.record_bits --out FILE.json         record this tree
    python -m analysis.bench.record_bits --against FILE.json     record again, print what differs, exit 1 if anything

Another revision is recorded with this same file, from the root of its checkout with its kernels built:

    cd /other/checkout && PYTHONPATH=. python /this/checkout/analysis/bench/record_bits.py --out FILE.json

Hence nothing is imported but torch and the public names of dsq. Recorded: quantise and pack over formats, shapes, axes,
dtypes, roundings and special values; outputs and gradients of linear layers; the training of converted encoders; and
of every stash policy gradients and bytes. Every case starts from its own seed, so that cases can be added or taken out
one by one. Any NaN counts as any other. A case that raises is recorded as the error it raised.

The order of a GEMM's sums depends on the machine, on the number of threads and on PyTorch's version: compare only what
was recorded on one machine with one PyTorch. That is why the data is not committed.
"""

import argparse
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq

Format = Any  #: a BFP, FixedPoint or Identity
Digests = dict[str, str]
Case = tuple[str, Callable[[], Mapping[str, Tensor | int | None]]]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def main() -> int:
    parser = argparse.ArgumentParser(description="Digests of what dsq computes, to hold revisions against each other.")
    parser.add_argument("--out", type=Path, help="where to write the digests")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    options = parser.parse_args()
    if options.out is None and options.against is None:
        parser.error("give --out FILE.json, --against FILE.json or both")
    old = None if options.against is None else json.loads(options.against.read_text())
    new = record()
    raised = sum(value.startswith("raised ") for value in new.values())
    print(f"{len(new):,} digests of {Path(dsq.__file__).parent}, {raised} cases raised")
    if options.out is not None:
        options.out.write_text(json.dumps(new, indent=0) + "\n")
    return 0 if old is None else compare(old, new)


def compare(old: Digests, new: Digests) -> int:
    """Print every key whose digests differ. Returns the exit status: 1 if there is one."""
    differing = [key for key in old | new if old.get(key) != new.get(key)]
    for key in differing:
        print(f"{key}: {old.get(key, 'not recorded')[:80]} -> {new.get(key, 'not recorded')[:80]}")
    print(f"{len(differing):,} of {len(old | new):,} differ")
    return 1 if differing else 0


def record() -> Digests:
    """Every case at one thread, and some at two: on a busy machine those take thirty times as long."""
    warnings.simplefilter("ignore")  # a q3 under 16 is recorded too
    found: Digests = {}
    for threads, step in ((1, 1), (2, 17)):
        torch.set_num_threads(threads)
        for part in (packing, large, linears, training, stashes):
            for name, run in list(part())[:: 1 if part is large else step]:
                key = f"threads {threads}/{part.__name__}/{name}"
                found |= {f"{key}: {what}": digest for what, digest in _digests(run).items()}
    return found


def _digests(run: Callable[[], Mapping[str, Tensor | int | None]]) -> Digests:
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

WIDE = (dsq.BFP(17), dsq.BFP(32), dsq.FixedPoint(24), dsq.Identity())
FORMATS = (
    *(dsq.BFP(bits) for bits in range(2, 17)),
    *(dsq.BFP(bits, box) for bits, box in product((2, 3, 4, 8, 16), (5, 8, 32))),
    *(dsq.BFP(4, box) for box in (1, 33, 100)),
    *(dsq.FixedPoint(bits) for bits in range(2, 17)),
    *(dsq.FixedPoint(bits, point) for bits, point in ((2, 0), (4, 2), (8, -3), (8, 4), (16, 10), (16, 100))),
    *WIDE,
)
#: a handful, where something else is varied
FEW = (dsq.BFP(4), dsq.BFP(2, 8), dsq.BFP(7, 5), dsq.BFP(16, 32), dsq.FixedPoint(8), dsq.FixedPoint(4, 1), dsq.BFP(32))
PLACES = (
    ((257,), -1),
    ((7, 33), -1),
    ((7, 33), 0),
    ((64, 128), 1),
    ((64, 128), 0),
    *(((3, 18, 40), d) for d in range(3)),
)
ODD_SHAPES = (
    (),
    (0,),
    (1,),
    (15,),
    (16,),
    (17,),
    (0, 16),
    (16, 0),
    (1, 1),
    (1, 40),
    (40, 1),
    (31, 17),
    (5, 1, 3),
    (2, 3, 4, 5),
)
SEEDS = (0, 1, 2**40 + 3, 2**62 - 1, -5)
KINDS = ("zeros", "nan", "inf", "subnormal", "huge", "mixed", "ties", "powers")
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(48, 35).t(),
    "permuted": lambda: torch.randn(5, 18, 20).permute(1, 2, 0),
    "strided": lambda: torch.randn(40, 70)[::2, 1::2],
    "offset": lambda: torch.randn(40 * 36 + 1)[1:].view(40, 36),
    "expanded": lambda: torch.randn(36, 1).expand(36, 40),
}


def packing() -> Iterator[Case]:
    for fmt, (shape, dim), dtype, seed in product(FORMATS, PLACES, DTYPES, (None, 7)):
        yield _packed(fmt, "normal", shape, dim, dtype, seed)
    for fmt, kind, dim, dtype, seed in product(FEW, KINDS, (0, 1), DTYPES, (None, 7)):
        yield _packed(fmt, kind, (34, 50), dim, dtype, seed)
    for fmt, shape, dtype in product(FEW, ODD_SHAPES, DTYPES):
        for dim in range(-1, max(len(shape) - 1, 0)):
            yield _packed(fmt, "normal", shape, dim, dtype, None)
    for fmt, seed in product((*FEW, *WIDE[2:]), SEEDS):
        yield _packed(fmt, "normal", (40, 100), -1, "float32", seed)
    for fmt, layout, dim, seed in product(FEW, LAYOUTS, (0, 1), (None, 7)):
        name = f"{fmt!r}/{layout} dim {dim}/seed {seed}"
        yield name, lambda fmt=fmt, layout=layout, dim=dim, seed=seed: _pack(LAYOUTS[layout](), fmt, dim, seed)


def large() -> Iterator[Case]:
    """Tensors that are divided between threads."""
    shapes = (((150, 4099), 0), ((150, 4099), 1), ((1 << 19,), 0), ((3, 100, 1024), 1))
    formats = (*(dsq.BFP(bits) for bits in (2, 4, 5, 8, 16)), dsq.BFP(4, 32), *FEW[4:6])
    for fmt, (shape, dim), seed in product(formats, shapes, (None, 7)):
        yield _packed(fmt, "normal", shape, dim, "float32", seed)
    for fmt, (shape, dim) in product(FEW[:3], shapes):
        yield _packed(fmt, "normal", shape, dim, "bfloat16", 7)


def _packed(fmt: Format, kind: str, shape: tuple[int, ...], dim: int, dtype: str, seed: int | None) -> Case:
    name = f"{fmt!r}/{'x'.join(map(str, shape)) or 'scalar'} dim {dim}/{dtype}/{kind}/seed {seed}"
    return name, lambda: _pack(_values(kind, shape).to(DTYPES[dtype]), fmt, dim, seed)


def _pack(x: Tensor, fmt: Format, dim: int, seed: int | None) -> dict[str, Tensor | int | None]:
    how = {"rounding": "nearest"} if seed is None else {"rounding": "stochastic", "seed": seed}
    packed = dsq.pack(x, fmt, dim, **how)
    scales = packed.scales if hasattr(packed, "scales") else packed.exponents
    found = {"quantize": dsq.quantize(x, fmt, dim, **how), "codes": packed.codes.reshape(-1), "nbytes": packed.nbytes}
    found |= {"scales": None if scales is None else scales.reshape(-1), "unpack": packed.unpack()}
    other = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    return found | {f"unpack to {other}": packed.unpack(other)}


def _values(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Normal values, of magnitudes that differ, with what ``kind`` says among them. float64, for what float32 lacks."""
    x = torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(-6, 6, shape)
    if kind == "zeros":
        x[::2] = 0.0
        x[1::4] *= -0.0
    elif kind in ("nan", "inf"):
        x.view(-1)[::97] = math.nan if kind == "nan" else math.inf
        x.view(-1)[50::301] = -math.inf
    elif kind == "ties":
        x = (x * 8).round() / 2
    elif kind == "powers":
        x = x.sign() * 2.0 ** torch.randint(-9, 9, shape)
    elif kind != "normal":
        low, high = {"subnormal": (-149, -120), "huge": (100, 127), "mixed": (-140, 120)}[kind]
        x = x.sign() * (1 + torch.rand(shape, dtype=torch.float64)) * 2.0 ** torch.randint(low, high, shape)
    return x


# ---- linear layers ----

LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[8,8,8,16]", "[16,4,4,16]", "[16,16,16,16]", "[3,5,7,16]", "[4,4,4,4]")
LEVELS += ("[32,32,32,32]", "[32,4,4,32]", "[4,32,8,16]")
STYLES: dict[str, dict[str, Any]] = {
    **{f"bfp box {box}": {"box": box} for box in (16, 8, 32, 5)},
    "fixed": {"format": "fixed"},
    "fixed at 3": {"format": "fixed", "fraction_bits": 3},
}
SIZES = (((33,), 48, 40), ((2, 17), 70, 31), ((128,), 128, 64), ((1,), 16, 16), ((3, 4, 25), 96, 136))  # tokens, K, N


def linears() -> Iterator[Case]:
    hows = product(("contraction", "last"), ("exact", "float32"), ("nearest", "stochastic"))
    for how, levels, style, size in product(hows, LEVELS, STYLES, SIZES):
        options = dict(zip(("box_axis", "units", "rounding"), how, strict=True), levels=levels) | STYLES[style]
        yield f"{levels}/{style}/{size}/{' '.join(how)}", lambda o=options, s=size: _linear(o, *s, bias=s[1] != 48)
    styles = {name: STYLES[name] for name in ("bfp box 16", "fixed")}
    for levels, style, (name, variant) in product(LEVELS[:4], styles, _variants()):
        options = {"levels": levels, **styles[style]}
        yield f"{levels}/{style}/{name}", lambda o=options, v=variant: _linear(o, **v)
    for levels in LEVELS:  # the function by itself
        yield (
            f"functional {levels}",
            lambda levels=levels: {
                "y": dsq.functional.linear(torch.randn(20, 36), torch.randn(24, 36), torch.randn(24), levels)
            },
        )


def _variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """What differs from a plain float32 layer whose every gradient is wanted."""
    base: dict[str, Any] = {"lead": (2, 33), "inner": 80, "outer": 48}
    for size, dtype in product((base, {"lead": (130,), "inner": 256, "outer": 192}), DTYPES):
        yield f"{dtype}, {size['inner']} wide", size | {"dtype": DTYPES[dtype]}
    yield "autocast", base | {"autocast": True}
    yield "no tokens", base | {"lead": (0,)}
    yield "transposed x", base | {"view": lambda x: x.transpose(0, 1)}
    yield "a part of x", base | {"view": lambda x: x[:, 3:29]}
    yield "NaN and infinity", base | {"view": _spoiled}
    for wanted in ("x", "w", "b", ""):
        yield f"gradient of {wanted or 'nothing'}", base | {"wanted": wanted}


def _spoiled(x: Tensor) -> Tensor:
    return x.index_fill(1, torch.tensor([4]), math.nan).index_fill(1, torch.tensor([9]), math.inf)


def _linear(
    options: dict[str, Any],
    lead: tuple[int, ...],
    inner: int,
    outer: int,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    view: Callable[[Tensor], Tensor] = lambda x: x,
    wanted: str = "xwb",
) -> dict[str, Tensor | None]:
    """y of a dsq.Linear and the gradients of its input, weight and bias."""
    layer = dsq.Linear(inner, outer, bias, dtype=dtype)
    dsq.set_level(layer, dsq.DSQConfig(**options), 0)
    x = torch.randn(*lead, inner).to(dtype).requires_grad_("x" in wanted)
    layer.weight.requires_grad_("w" in wanted)
    if layer.bias is not None:
        layer.bias.requires_grad_("b" in wanted)
    with _autocast(autocast):
        y = layer(view(x))
    if y.requires_grad:
        y.backward(torch.randn(y.shape).to(y.dtype))
    return {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": None if layer.bias is None else layer.bias.grad}


def _autocast(enabled: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


# ---- models ----


class Block(nn.Module):
    """Pre-LN encoder block, x (B, T, D): q, k and v share an input, as in most models; its products are seen."""

    def __init__(self, width: int = 48, heads: int = 4, sdpa: bool = False) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = self.dropout((q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).softmax(-1)) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


def _torch_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2)


def _convolutions() -> nn.Module:
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(block(3, 16), block(16, 24), nn.Flatten(), nn.Linear(24 * 9, 10))


#: makers of a model and the shape of its input
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (lambda: nn.Sequential(Block(), Block(), nn.LayerNorm(48)), (4, 20, 48)),
    "sdpa": (lambda: nn.Sequential(Block(sdpa=True), Block(sdpa=True), nn.LayerNorm(48)), (4, 20, 48)),
    "torch encoder": (_torch_encoder, (4, 20, 48)),
    "convolutions": (_convolutions, (8, 3, 12, 12)),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fixed": {"format": "fixed"},
    "stochastic": {"rounding": "stochastic"},
    "last axis": {"box_axis": "last", "box": 8},
    "float32": {"units": "float32"},
    "excluding": {"exclude": "linear1|fc1", "eval_full_precision": True},
}


def training() -> Iterator[Case]:
    for model, name, autocast in product(("blocks", "torch encoder"), TRAININGS, (False, True)):
        yield f"{model}/{name}{', autocast' * autocast}", lambda m=model, n=name, a=autocast: _train(m, TRAININGS[n], a)


def _train(name: str, options: dict[str, Any], autocast: bool) -> dict[str, Tensor]:
    """Four steps, two at each level, then an evaluation."""
    make, shape = MODELS[name]
    config = dsq.DSQConfig(**options)
    model, x, found = dsq.convert(make(), config), torch.randn(shape), {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        dsq.set_level(model, config, step // 2)
        with _autocast(autocast):
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
ALONE: Policies = (
    *(("bfp", options) for options in ({}, {"bits": 2}, {"bits": 8, "box": 32}, {"bits": 16}, {"bits": 32})),
    ("bfp", {"rounding": "stochastic", "seed": 3}),
    *(("mesa", options) for options in ({}, {"kinds": ("softmax", "gelu", "relu")}, {"decay": 0.5, "seed": 2})),
    ("mesa", {"groups": 2, "rounding": "nearest"}),
    *(("gact", options) for options in ({}, {"bits": 2}, {"bits": 3.5, "adapt_interval": 1}, {"adapt_interval": None})),
    *(("gact", {"level": level}) for level in ("L2", "CB1", "CB2")),
    ("gact", {"format": "bfp", "seed": 4}),
    ("selective", {}),
    *(("wtacrs", options) for options in ({}, {"ratio": 0.5, "products": True}, {"exclude": "fc1", "seed": 5})),
    ("checkpoint", {}),
    ("checkpoint", {"segments": r"0|layers\.1"}),
)
TOGETHER: tuple[Policies, ...] = (
    *((policy, ("bfp", {"bits": 4})) for policy in (("wtacrs", {}), ("selective", {}), ("checkpoint", {}))),
    (("bfp", {}), ("wtacrs", {"products": True})),
    (("checkpoint", {}), ("mesa", {})),
    *((("dsq.convert", {}), policy) for policy in (("bfp", {}), ("gact", {}), ("mesa", {}), ("checkpoint", {}))),
    (("dsq.convert", {}), ("selective", {})),
)
FREEZING: dict[str, Callable[[str], bool]] = {"": lambda name: False, "biases only": lambda name: "bias" not in name}


def stashes() -> Iterator[Case]:
    for model, policies in product(MODELS, (*((policy,) for policy in ALONE), *TOGETHER)):
        for frozen in FREEZING if policies[0][0] in ("selective", "bfp") else ("",):
            name = (
                f"{model}/{' + '.join(f'{policy} {options}' for policy, options in policies)}/{frozen or 'all train'}"
            )
            yield name, lambda m=model, p=policies, f=frozen: _stash(m, p, FREEZING[f])


def _stash(name: str, policies: Policies, frozen: Callable[[str], bool]) -> dict[str, Tensor | int]:
    """Three training steps: bytes kept for the backward, loss and gradients of each."""
    make, shape = MODELS[name]
    model, x, found, controllers = make(), torch.randn(shape), {}, []
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(parameter_name))
    for policy, options in policies:
        if policy == "dsq.convert":
            dsq.convert(model, dsq.DSQConfig(**options))
        else:
            controllers.append(dsq.stash.apply(model, policy, **options))
    for controller in controllers:
        if controller.name == "wtacrs" and name != "convolutions":
            controller.set_sample_ids(range(shape[0]))
    for step in range(3):
        torch.manual_seed(step)
        losses: list[Tensor] = []

        def forward(losses: list[Tensor] = losses) -> Tensor:
            losses.append(model(x).square().mean())
            return losses[-1]

        report = dsq.stash.measure(forward)
        losses[-1].backward()
        found |= {f"bytes {step}": report.nbytes, f"loss {step}": losses[-1]}
        found |= {f"bytes {step}, {dtype}": nbytes for dtype, nbytes in report.by("dtype").items()}
        found[f"gradients {step}"] = _flat(parameter.grad for parameter in model.parameters())
        for number, controller in enumerate(controllers):
            found[f"kept bytes {step}, policy {number}"] = controller.report().kept_bytes
        model.zero_grad()
    return found


if __name__ == "__main__":
    sys.exit(main())
