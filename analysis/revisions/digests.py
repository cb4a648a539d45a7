"""What analysis.revisions.record_bits records, by the public names of dsq alone: digests as JSON.

Quantise and pack over formats, shapes, axes, dtypes, roundings and special values; outputs and gradients of linear
layers; the training of converted models; and of every stash policy gradients and bytes. Each case starts from one seed,
so that cases can be added or taken out. Any NaN counts as any other. A case that raises is recorded as its error.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis.models import encoder, resnet20

Found = Mapping[str, Tensor | int | None]
Case = tuple[str, Callable[[], Found]]  #: its name, and what computes it
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(_: list[str]) -> None:
    """Print {case: digest}: every case at one thread, and some at two, which a busy machine slows thirtyfold."""
    warnings.simplefilter("ignore")  # a q3 under 16 is recorded too
    found: dict[str, str] = {}
    for threads, step in ((1, 1), (2, 17)):
        torch.set_num_threads(threads)
        for part in (packing, large, linears, training, stashes):
            for name, run in list(part())[:: 1 if part is large else step]:
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
    *(dsq.BFP(bits, box) for bits, box in product((2, 3, 4, 8, 16), (5, 8, 32))),
    *(dsq.BFP(4, box) for box in (1, 33, 100)),
    *(dsq.FixedPoint(bits) for bits in (*range(2, 17), 24)),
    *(dsq.FixedPoint(bits, point) for bits, point in ((2, 0), (4, 2), (8, -3), (8, 4), (16, 10), (16, 100))),
    dsq.Identity(),
)
#: a handful, where something else is varied
FEW = (dsq.BFP(4), dsq.BFP(2, 8), dsq.BFP(7, 5), dsq.BFP(16, 32), dsq.FixedPoint(8), dsq.FixedPoint(4, 1), dsq.BFP(32))
PLACES: tuple[tuple[tuple[int, ...], int], ...] = (
    *(((257,), -1), ((7, 33), -1), ((7, 33), 0), ((64, 128), 1), ((64, 128), 0)),
    *(((3, 18, 40), dim) for dim in range(3)),
)
ODD_SHAPES = ((), (0,), (1,), (15,), (16,), (17,), (0, 16), (16, 0), (1, 1), (1, 40), (40, 1), (31, 17), (5, 1, 3))
SEEDS = (0, 1, 2**40 + 3, 2**62 - 1, -5)
KINDS = ("zeros", "nan", "inf", "subnormal", "huge", "mixed", "ties", "powers")
VIEWS: dict[str, Callable[[], Tensor]] = {
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
    for fmt, seed in product(FEW, SEEDS):
        yield _packed(fmt, "normal", (40, 100), -1, torch.float32, seed)
    for fmt, view, dim, seed in product(FEW, VIEWS, (0, 1), (None, 7)):
        name = f"{fmt!r}/{view} dim {dim}/seed {seed}"
        yield name, lambda fmt=fmt, view=view, dim=dim, seed=seed: _pack(VIEWS[view](), fmt, dim, seed)


def large() -> Iterator[Case]:
    """Tensors that are divided between threads."""
    shapes = (((150, 4099), 0), ((150, 4099), 1), ((1 << 19,), 0), ((3, 100, 1024), 1))
    formats = (*(dsq.BFP(bits) for bits in (2, 4, 5, 8, 16)), dsq.BFP(4, 32), *FEW[4:6])
    for fmt, (shape, dim), dtype, seed in product(formats, shapes, DTYPES[:2], (None, 7)):
        yield _packed(fmt, "normal", shape, dim, dtype, seed)


def _packed(fmt: Any, kind: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int | None) -> Case:
    name = f"{fmt!r}/{'x'.join(map(str, shape)) or 'scalar'} dim {dim}/{dtype}/{kind}/seed {seed}"
    return name, lambda: _pack(_values(kind, shape).to(dtype), fmt, dim, seed)


def _pack(x: Tensor, fmt: Any, dim: int, seed: int | None) -> Found:
    how = ("nearest", 0) if seed is None else ("stochastic", seed)
    packed = dsq.pack(x, fmt, dim, *how)
    scales = packed.scales if hasattr(packed, "scales") else packed.exponents
    found = {"quantize": dsq.quantize(x, fmt, dim, *how), "codes": packed.codes.reshape(-1), "nbytes": packed.nbytes}
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

LEVELS = [f"[{widths}]" for widths in ("2,2,2,16", "4,4,4,16", "8,8,8,16", "16,4,4,16", "16,16,16,16", "3,5,7,16")]
LEVELS += ["[4,4,4,4]", "[32,32,32,32]", "[32,4,4,32]", "[4,32,8,16]"]
STYLES: list[dict[str, Any]] = [{"box": box} for box in (16, 8, 32, 5)]
STYLES += [{"format": "fixed"}, {"format": "fixed", "fraction_bits": 3}]
HOW = {"box_axis": ("contraction", "last"), "units": ("exact", "float32"), "rounding": ("nearest", "stochastic")}
#: leading dimensions of x, K and N
SIZES = (((33,), 48, 40), ((2, 17), 70, 31), ((128,), 128, 64), ((1,), 16, 16), ((3, 4, 25), 96, 136))
FOURTH = torch.tensor([4])
#: what differs from a plain float32 layer whose every gradient is wanted
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{dtype}": {"dtype": dtype} for dtype in DTYPES},
    **{f"{dtype}, wide": {"lead": (130,), "inner": 256, "outer": 192, "dtype": dtype} for dtype in DTYPES},
    "autocast": {"autocast": True},
    "no tokens": {"lead": (0,)},
    "transposed x": {"view": lambda x: x.transpose(0, 1)},
    "a part of x": {"view": lambda x: x[:, 3:29]},
    "NaN, infinity": {"view": lambda x: x.index_fill(1, FOURTH, math.nan).index_fill(1, 2 * FOURTH, math.inf)},
    **{f"gradient of {wanted or 'nothing'}": {"wanted": wanted} for wanted in ("x", "w", "b", "")},
}


def linears() -> Iterator[Case]:
    for how, levels, style, size in product(product(*HOW.values()), LEVELS, STYLES, SIZES):
        options = dict(zip(HOW, how, strict=True), levels=levels) | style
        yield f"{levels}/{style}/{size}/{' '.join(how)}", lambda o=options, s=size: _linear(o, *s, bias=s[1] != 48)
    for levels, style, name in product(LEVELS[:4], (STYLES[0], STYLES[4]), VARIANTS):
        options = {"levels": levels, **style}
        yield f"{levels}/{style}/{name}", lambda o=options, v=VARIANTS[name]: _linear(o, **v)


def _linear(
    options: dict[str, Any],
    lead: tuple[int, ...] = (2, 33),
    inner: int = 80,
    outer: int = 48,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    view: Callable[[Tensor], Tensor] = lambda x: x,
    wanted: str = "xwb",
) -> Found:
    """y of a dsq.Linear and the gradients of its input, weight and bias."""
    layer = dsq.Linear(inner, outer, bias, dtype=dtype)
    dsq.set_level(layer, dsq.DSQConfig(**options), 0)
    x = torch.randn(*lead, inner).to(dtype).requires_grad_("x" in wanted)
    layer.weight.requires_grad_("w" in wanted)
    if layer.bias is not None:
        layer.bias.requires_grad_("b" in wanted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(view(x))
    if y.requires_grad:
        y.backward(torch.randn(y.shape).to(y.dtype))
    return {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": None if layer.bias is None else layer.bias.grad}


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
        yield name, lambda m=model, o=options, a=autocast: _train(m, o, a)


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
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "bfp": ({}, {"bits": 2}, {"bits": 8, "box": 32}, {"bits": 32}, {"rounding": "stochastic", "seed": 3}),
    "mesa": ({}, {"kinds": ("softmax", "gelu", "relu")}, {"decay": 0.5, "seed": 2}, {"groups": 2}),
    "gact": (
        *({}, {"bits": 2}, {"bits": 3.5, "adapt_interval": 1}, {"adapt_interval": None}, {"format": "bfp"}),
        *({"level": level} for level in ("L2", "CB1", "CB2")),
    ),
    "selective": ({},),
    "wtacrs": ({}, {"ratio": 0.5, "products": True}, {"exclude": "fc1", "seed": 5}),
    "checkpoint": ({}, {"segments": r"0|layers\.1"}),
}
ALONE: tuple[Policies, ...] = tuple(((name, given),) for name, options in OPTIONS.items() for given in options)
TOGETHER: tuple[Policies, ...] = (
    *(((first, {}), ("bfp", {"bits": 4})) for first in ("wtacrs", "selective", "checkpoint")),
    (("bfp", {}), ("wtacrs", {"products": True})),
    (("checkpoint", {}), ("mesa", {})),
    *((("dsq.convert", {}), (second, {})) for second in ("bfp", "gact", "mesa", "checkpoint", "selective")),
)


def stashes() -> Iterator[Case]:
    for model, policies in product(MODELS, ALONE + TOGETHER):
        for trained in ("", "bias") if policies[0][0] in ("selective", "bfp") else ("",):
            name = f"{model}/{policies}/{trained or 'all'} trained"
            yield name, lambda m=model, p=policies, t=trained: _stash(m, p, t)


def _stash(name: str, policies: Policies, trained: str) -> Found:
    """Three training steps: bytes kept for the backward, loss and gradients of each."""
    make, shape = MODELS[name]
    model, x, found = make(), torch.randn(shape), dict[str, Tensor | int]()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in parameter_name)
    if policies[0][0] == "dsq.convert":
        dsq.convert(model, dsq.DSQConfig(levels="[4,4,4,16] [16,4,4,16]"))
    controllers = [dsq.stash.apply(model, policy, **given) for policy, given in policies if policy != "dsq.convert"]
    for controller in controllers:
        if controller.name == "wtacrs" and name != "convolutions":
            controller.set_sample_ids(range(shape[0]))  # type: ignore[attr-defined]
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
        found |= {f"kept bytes {step}, policy {n}": c.report().kept_bytes for n, c in enumerate(controllers)}
        model.zero_grad()
    return found
