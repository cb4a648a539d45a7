"""The pointwise passes of a model, of the kinds that the cost model names, in float32 and under bfloat16 autocast.

As models of transformers run them: under autocast norms and softmax compute in float32, and the residual stream stays
in it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.calibration.clock import backward_seconds, seconds
from dsq.formats import BFP
from dsq.packing import pack

#: (rows, width) of the two sizes that each is timed at: a cost for each value and one for each call
SIZES = ((64, 128), (2048, 1024))
#: rows of an embedding's table, classes of a loss: of (rows, classes) of its own
WORDS = 4096
#: width of an attention's head
HEAD = 64
LOSS_SIZES = ((64, 128), (512, WORDS))
ADAM_SIZES = (1 << 13, 1 << 23)
STASHES = (2, 4, 8, 16)
#: kinds whose backward copies as the forward does, where autograd alone would leave a view
COPIES = ("heads", "transposed", "turned")

#: the outputs of one forward, and the tensors that get a gradient
Forward = tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]


def passes(device: torch.device) -> list[dict[str, Any]]:
    """The [[pass]] tables."""
    found = []
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16)):
        times: dict[tuple[str, str], list[float]] = {}
        for size in SIZES:
            for kind, (forward, wanted) in _kinds(device, dtype, *size).items():
                times.setdefault((kind, "forward"), []).append(seconds(forward))
                taken = times[kind, "forward"][-1] if kind in COPIES else backward_seconds(forward(), wanted)
                times.setdefault((kind, "backward"), []).append(taken)
        counts = [rows * width for rows, width in SIZES]
        found += [_pass(kind, bits, phase, counts, taken) for (kind, phase), taken in times.items()]
        found += _both_phases("loss", bits, LOSS_SIZES, partial(_loss_seconds, device, dtype))
        adam = [_adam_seconds(device, count) for count in ADAM_SIZES]
        found.append(_pass("adam", bits, "update", ADAM_SIZES, adam))
    for bits in STASHES:
        found += _both_phases("pack", bits, SIZES, partial(_packing_seconds, device, BFP(bits)))
    return found


def _kinds(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> dict[str, Forward]:
    def values(dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)

    x, up, x32, mask = values(), values(), values(torch.float32), torch.zeros(width, device=device)
    scale, shift = (torch.ones(width, device=device, requires_grad=True) for _ in range(2))
    table = torch.randn(WORDS, width, device=device, requires_grad=True)
    ids = torch.randint(WORDS, (rows,), device=device)

    turned = torch.randn(rows, width, device=device)  # float32 under autocast too, as the residual stream is
    heads = max(width // HEAD, 1)
    keys = x.view(-1, min(rows, HEAD), heads, width // heads)

    def rotary() -> list[Tensor]:
        halves = torch.cat((-x[:, width // 2 :], x[:, : width // 2]), -1)
        return [(x * turned + halves * turned).to(dtype)]

    def rms() -> list[Tensor]:
        return [scale * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6))]

    def softmax() -> list[Tensor]:
        return [F.softmax(x, -1, dtype=torch.float32).to(dtype)]

    return {
        "activation": (lambda: [F.gelu(x)], [x]),
        "relu": (lambda: [F.relu(x)], [x]),
        "gate": (lambda: [F.silu(x) * up], [x, up]),
        "softmax": (softmax, [x]),
        "scale": (lambda: [x * 0.125 + mask], [x]),
        "rotary": (rotary, [x]),
        "heads": (lambda: [x.view(rows, heads, -1).transpose(0, 1).contiguous()], [x]),
        "transposed": (lambda: [keys.permute(0, 2, 3, 1).contiguous()], [x]),
        "turned": (lambda: [x.t().contiguous()], [x]),
        "column sum": (lambda: [x.sum(0)], [x]),
        "tied": (lambda: [x32.view_as(x32), x32.view_as(x32)], [x32]),  # the backward sums two gradients
        "dropout": (lambda: [F.dropout(x, 0.1)], [x]),
        "norm": (lambda: [F.layer_norm(x32, (width,), scale, shift)], [x32, scale, shift]),
        "rms": (rms, [x32, scale]),
        "residual": (lambda: [x32 + x, x32.view_as(x32)], [x32, x]),  # the backward sums two branches
        "embedding": (lambda: [F.embedding(ids, table)], [table]),
    }


def _loss_seconds(device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> tuple[float, float]:
    logits = torch.randn(rows, classes, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (rows,), device=device)

    def forward() -> list[Tensor]:
        return [F.cross_entropy(logits.float(), labels)]

    return seconds(forward), backward_seconds(forward(), [logits])


def _adam_seconds(device: torch.device, count: int) -> float:
    parameter = torch.randn(count, device=device, requires_grad=True)
    parameter.grad = torch.randn_like(parameter)
    return seconds(torch.optim.Adam([parameter], fused=True).step)


def _packing_seconds(device: torch.device, fmt: BFP, rows: int, width: int) -> tuple[float, float]:
    """Packing is the "forward", unpacking the "backward"; `bits` are the code's."""
    x = torch.randn(rows, width, device=device)
    packed = pack(x, fmt)
    return seconds(partial(pack, x, fmt)), seconds(packed.unpack)


def _both_phases(
    kind: str, bits: int, sizes: Sequence[tuple[int, int]], timed: Callable[[int, int], tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    times = zip(*(timed(rows, width) for rows, width in sizes), strict=True)
    for phase, taken in zip(("forward", "backward"), times, strict=True):
        yield _pass(kind, bits, phase, [rows * width for rows, width in sizes], taken)


def _pass(kind: str, bits: int, phase: str, counts: Sequence[int], taken: Sequence[float]) -> dict[str, Any]:
    per_value = max((taken[1] - taken[0]) / (counts[1] - counts[0]), 0.0)
    per_call = max(taken[0] - per_value * counts[0], 0.0)
    found = {"kind": kind, "bits": bits, "phase": phase}
    return found | {"ns_per_value": 1e9 * per_value, "us_per_call": 1e6 * per_call}
