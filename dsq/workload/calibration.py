"""Times of products, passes and memory on this machine, for `dsq-cost calibrate`: plain data, no import of the cost
model.

Shape suffixes: M rows, K summed over, N columns, B products in a batch.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from itertools import chain, combinations, cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as wall_clock

from dsq.command import processor
from dsq.linear import Linear
from dsq.precision import Precision
from dsq.stash.policy import apply

#: float32 values of the copy: 256 MiB read and as many written, beyond any cache
COPIED = 1 << 26
#: and of an addition that stays within one
ADDED = 1 << 14


def measure_hardware(device: torch.device) -> dict[str, Any]:
    """Return the tables of a hardware file, of the schema of costmodel/hardware/hardware.py, in under two minutes."""
    torch.manual_seed(0)
    threads = f"{torch.get_num_threads()} threads, " if device.type == "cpu" else ""
    x, y = (torch.empty(COPIED, device=device).fill_(value) for value in (0.0, 1.0))
    copied = seconds(lambda: y.copy_(x))
    a, b = x[:ADDED], y[:ADDED].clone()
    added = seconds(lambda: b.add_(a))
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = processor(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": name,
        "cpu": device.type == "cpu",
        "measured": f"{date.today().isoformat()}, {threads}torch {torch.__version__}",
        "bandwidth": {"gb_per_s": 8e-9 * COPIED / copied, "source": "measured: copy of 256 MiB, read and written"},
        "memory": {"gb": memory * 1e-9, "source": "as the machine reports it"},
        "vector": {"tflops": 1e-12 * ADDED / added, "source": "measured: addition of 16,384 float32 values"},
        "peak": units(device),
        "pass": passes(device),
    }


# ---- the one way to time

#: that a timing lasts; its quickest block of calls counts, since other work on the machine only slows
SECONDS = 0.1


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one ``call``, with PyTorch's threads as they are; a GPU is waited for.

    They are wall time; on one thread of a machine without a GPU CPU time, which other work on the machine does not
    stretch.
    """
    threads = torch.get_num_threads()
    clock = time.process_time if threads == 1 and not torch.cuda.is_available() else wall_clock
    timer = Timer("call()", timer=clock, globals={"call": call}, num_threads=threads)
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)


def backward_seconds(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the seconds of computing the gradients of ``inputs`` from those of ``outputs``."""
    gradients = [torch.randn_like(output) for output in outputs]
    return seconds(lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True))


# ---- matrix products, each with what surrounds it in training: casts, quantizing, packing the stash

#: shapes of linear layers, (M, K, N): the sizes between which small and large models lie
LAYERS = ((256, 64, 64), (128, 256, 256), (512, 256, 1024), (512, 1024, 256), (1024, 512, 512), (512, 512, 2048))
#: of attention's products, (B, M, K, N)
BATCHED = ((32, 128, 32, 128), (32, 128, 128, 32), (16, 256, 64, 256), (16, 256, 256, 64))
#: of q, k and v in fused attention, (B, H, T, d): sequences, heads, tokens, width of a head
FUSED = ((8, 8, 128, 64), (4, 8, 256, 64), (1, 8, 1024, 64))
#: layers of a size that take turns, as many as a small model has: a step finds few of its tensors in a cache
COPIES = 16
CODE_WIDTHS = (2, 4, 8)
WIDE = 16


class TimedProduct(NamedTuple):
    """How long one product took."""

    flops: float
    values: float  #: in operands and result
    seconds: float


def units(device: torch.device) -> list[dict[str, Any]]:
    """Return the [[peak]] tables, narrow operands first, as dsq takes its kernels."""
    equal_widths: dict[int, list[TimedProduct]] = {}
    mixed_widths: dict[int, list[TimedProduct]] = {}
    for m in CODE_WIDTHS:
        forward, dx, mixed_widths[m] = _layer_times(device, Precision(m, m, m, WIDE))
        equal_widths[m] = forward + dx
    equal_widths[WIDE] = _layer_times(device, Precision(WIDE, 4, 4, WIDE))[0]
    peaks = [_unit(f"{m} x {m} bits", {"bfp": m}, equal_widths[m]) for m in CODE_WIDTHS]
    peaks += [_unit(f"{WIDE} x {m} bits", {"bfp": [WIDE, m]}, mixed_widths[m]) for m in CODE_WIDTHS]
    peaks.append(_unit(f"{WIDE} x {WIDE} bits", {"bfp": WIDE}, equal_widths[WIDE]))
    for name, dtype, holds in (
        ("bf16", torch.bfloat16, {"float": 16}),
        ("fp32", torch.float32, {"float": 32, "bfp": 32, "fixed": 32}),
    ):
        layers = _layer_times(device, None, autocast=dtype is torch.bfloat16)
        unit = _unit(name, holds, [*chain(*layers), *_batched_times(device, dtype)])
        peaks.append(unit | {"attention": _fused_unit(device, dtype)})
    return peaks


def _layer_times(
    device: torch.device, precision: Precision | None, autocast: bool = False
) -> tuple[list[TimedProduct], list[TimedProduct], list[TimedProduct]]:
    """Return a linear layer's forward, dx and dw, at each of LAYERS; `precision`: of a converted one."""
    times: tuple[list[TimedProduct], ...] = ([], [], [])
    for M, K, N in LAYERS:
        layers = [Linear(K, N, precision=precision) if precision else nn.Linear(K, N) for _ in range(COPIES)]
        inputs = [torch.randn(M, K, device=device) for _ in layers]
        for layer in layers:
            layer.to(device)

        def forward(inputs: list[torch.Tensor] = inputs, layers: list[nn.Linear] = layers) -> list[torch.Tensor]:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return [layer(x) for layer, x in zip(layers, inputs, strict=True)]

        forward_seconds = seconds(forward)
        dw_seconds = backward_seconds(forward(), [layer.weight for layer in layers])
        for layer in layers:
            layer.requires_grad_(False)  # a backward for dx alone
        leaves = [x.requires_grad_() for x in inputs]
        dx_seconds = backward_seconds(forward(), leaves)
        for phase, duration in zip(times, (forward_seconds, dx_seconds, dw_seconds), strict=True):
            phase.append(TimedProduct(2.0 * M * K * N, M * K + K * N + M * N, duration / COPIES))
    return times  # type: ignore[return-value]


def _batched_times(device: torch.device, dtype: torch.dtype) -> Iterator[TimedProduct]:
    for B, M, K, N in BATCHED:
        x, w = (torch.randn(B, rows, K, device=device, dtype=dtype, requires_grad=True) for rows in (M, N))
        y = x @ w.mT
        flops, values = 2.0 * B * M * K * N, B * (M * K + K * N + M * N)
        yield TimedProduct(flops, values, seconds(partial(torch.matmul, x, w.mT)))
        for operand in (x, w):
            yield TimedProduct(flops, values, backward_seconds([y], [operand]))


def _fused_unit(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the rates of a product in a fused attention kernel, of two in the forward and five in the backward, and
    the share of its time that a causal mask leaves."""
    times, causal_shares = [], []
    for size in FUSED:
        B, H, T, d = size
        q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        durations = {}
        for causal in (False, True):
            attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
            durations[causal] = seconds(attend), backward_seconds([attend()], [q, k, v])
        for phase, products in zip(durations[False], (2, 5), strict=True):
            times.append(TimedProduct(2.0 * B * H * T * T * d, 2 * B * H * T * d, phase / products))
        causal_shares.append(sum(durations[True]) / sum(durations[False]))
    return _rates(*fitted(times)) | {"causal": min(float(np.median(causal_shares)), 1.0)}


def _unit(datatype: str, holds: dict[str, Any], times: list[TimedProduct]) -> dict[str, Any]:
    per_flop, per_value, per_call = fitted(times)
    errors = [abs(t.flops * per_flop + t.values * per_value + per_call - t.seconds) / t.seconds for t in times]
    error = f"{np.median(errors):.0%} (median), {max(errors):.0%} (worst)"
    source = f"measured: {len(times)} products, the fit is off by {error}"
    return {"datatype": datatype, **_rates(per_flop, per_value, per_call), "holds": holds, "source": source}


def _rates(per_flop: float, per_value: float, per_call: float) -> dict[str, float]:
    terms = {"ns_per_value": 1e9 * per_value, "us_per_call": 1e6 * per_call}
    return {"tflops": 1e-12 / per_flop} | {name: value for name, value in terms.items() if value}


def fitted(times: list[TimedProduct]) -> tuple[float, float, float]:
    """Return the seconds an operation, a value and a product: least squares of relative errors, none negative."""
    terms = np.array([[t.flops, t.values, 1.0] for t in times]) / np.array([[t.seconds] for t in times])
    best, best_error = np.zeros(3), np.inf
    for columns in ([0, *regressors] for count in range(3) for regressors in combinations((1, 2), count)):
        solution = np.linalg.lstsq(terms[:, columns], np.ones(len(times)), rcond=None)[0]
        error = float(np.square(terms[:, columns] @ solution - 1).sum())
        if (solution >= 0).all() and solution[0] > 0 and error < best_error:
            best, best_error = np.zeros(3), error
            best[columns] = solution
    return float(best[0]), float(best[1]), float(best[2])


# ---- pointwise passes of a model, in float32 and under bfloat16 autocast, where norms and softmax compute in float32

#: (rows, width) of the two sizes that each is timed at: a cost for each value and one for each call
SIZES = ((64, 128), (2048, 1024))
#: rows of an embedding's table, classes of a loss: of (rows, classes) of its own
WORDS = 4096
#: width of an attention's head
HEAD = 64
LOSS_SIZES = ((64, 128), (512, WORDS))
ADAM_SIZES = (1 << 13, 1 << 23)
#: a code whose packing is timed, for all: it takes about as long at 2 bits as at 8
STASH_BITS = 4
STASHING = 12  #: operations of a model that stashes
#: kinds whose backward copies as the forward does, where autograd alone would leave a view
COPYING = ("heads", "transposed", "turned")

#: the outputs of one forward, and the tensors that get a gradient
Forward = tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]


def passes(device: torch.device) -> list[dict[str, Any]]:
    """Return the [[pass]] tables."""
    tables = []
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16)):
        for sizes, make in ((SIZES, _kinds), (LOSS_SIZES, _loss)):
            times: dict[tuple[str, str], list[float]] = {}
            for size in sizes:
                for kind, (forward, leaves) in make(device, dtype, *size).items():
                    times.setdefault((kind, "forward"), []).append(seconds(forward))
                    duration = times[kind, "forward"][-1] if kind in COPYING else backward_seconds(forward(), leaves)
                    times.setdefault((kind, "backward"), []).append(duration)
            counts = [rows * width for rows, width in sizes]
            tables += [_pass_table(kind, bits, phase, counts, durations) for (kind, phase), durations in times.items()]
        adam = [_adam_seconds(device, count) for count in ADAM_SIZES]
        tables.append(_pass_table("adam", bits, "update", ADAM_SIZES, adam))
    packing, counts = [_packing_seconds(device, *size) for size in SIZES], [rows * width for rows, width in SIZES]
    for index, phase in enumerate(("forward", "backward")):
        tables.append(_pass_table("pack", STASH_BITS, phase, counts, [durations[index] for durations in packing]))
    return tables


def _kinds(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> dict[str, Forward]:
    def values(dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)

    x, up, x32, mask = values(), values(), values(torch.float32), torch.zeros(width, device=device)
    scale, shift = (torch.ones(width, device=device, requires_grad=True) for _ in range(2))
    table = torch.randn(WORDS, width, device=device, requires_grad=True)
    ids = torch.randint(WORDS, (rows,), device=device)

    angles = torch.randn(rows, width, device=device)  # float32 under autocast too, as the residual stream is
    heads = max(width // HEAD, 1)
    keys = x.view(-1, min(rows, HEAD), heads, width // heads)

    def rotary() -> list[Tensor]:
        halves = torch.cat((-x[:, width // 2 :], x[:, : width // 2]), -1)
        return [(x * angles + halves * angles).to(dtype)]

    def rms() -> list[Tensor]:
        return [scale * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6))]

    def gelu_new() -> list[Tensor]:  # as transformers writes it out
        return [0.5 * x * (1.0 + torch.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))]

    def softmax() -> list[Tensor]:
        return [F.softmax(x, -1, dtype=torch.float32).to(dtype)]

    return {
        "activation": (lambda: [F.gelu(x)], [x]),
        "relu": (lambda: [F.relu(x)], [x]),
        "gelu_new": (gelu_new, [x]),
        "quick_gelu": (lambda: [x * torch.sigmoid(1.702 * x)], [x]),
        "product": (lambda: [x * up], [x, up]),
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


class _Stashing(nn.Module):
    """Norms, GELUs and softmax, each of an input of its own: what PyTorch saves exact, and a stash policy codes."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        operations: Iterator[Callable[..., Tensor]] = cycle((self.norm, F.gelu, partial(F.softmax, dim=-1)))
        return [operation(x) for operation, x in zip(operations, inputs, strict=False)]


def _packing_seconds(device: torch.device, rows: int, width: int) -> tuple[float, float]:
    """Return what the policy bfp adds to an operation, in the forward and in the backward."""
    inputs = [torch.randn(rows, width, device=device, requires_grad=True) for _ in range(STASHING)]
    gradients = [torch.randn_like(x) for x in inputs]
    plain, packed = (_Stashing(width).to(device) for _ in range(2))
    apply(packed, "bfp", bits=STASH_BITS)

    def added(step: Callable[[nn.Module], object]) -> float:
        return max(seconds(partial(step, packed)) - seconds(partial(step, plain)), 0.0) / STASHING

    forward = added(lambda model: model(*inputs))
    return forward, max(added(lambda model: torch.autograd.grad(model(*inputs), inputs, gradients)) - forward, 0.0)


def _loss(device: torch.device, dtype: torch.dtype, rows: int, classes: int) -> dict[str, Forward]:
    logits = torch.randn(rows, classes, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (rows,), device=device)
    return {"loss": (lambda: [F.cross_entropy(logits.float(), labels)], [logits])}


def _adam_seconds(device: torch.device, count: int) -> float:
    parameter = torch.randn(count, device=device, requires_grad=True)
    parameter.grad = torch.randn_like(parameter)
    return seconds(torch.optim.Adam([parameter], fused=True).step)


def _pass_table(kind: str, bits: int, phase: str, counts: Sequence[int], durations: Sequence[float]) -> dict[str, Any]:
    per_value = max((durations[1] - durations[0]) / (counts[1] - counts[0]), 0.0)
    per_call = max(durations[0] - per_value * counts[0], 0.0)
    entry = {"kind": kind, "bits": bits, "phase": phase}
    return entry | {"ns_per_value": 1e9 * per_value, "us_per_call": 1e6 * per_call}
