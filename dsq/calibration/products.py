"""Matrix products, each with what surrounds it in training: casts, quantising, packing the stash.

Shape suffixes: M rows, K summed over, N columns, B products in a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from dsq.calibration.clock import backward_seconds, seconds
from dsq.linear import Linear
from dsq.precision import Precision

#: of linear layers, (M, K, N): the sizes between which small and large models lie
LAYERS = ((256, 64, 64), (128, 256, 256), (512, 256, 1024), (512, 1024, 256), (1024, 512, 512), (512, 512, 2048))
#: of attention's products, (B, M, K, N)
BATCHED = ((32, 128, 32, 128), (32, 128, 128, 32), (16, 256, 64, 256), (16, 256, 256, 64))
#: layers of a size that take turns, as many as a small model has: a step finds few of its tensors in a cache
COPIES = 16
CODE_WIDTHS = (2, 4, 8)
WIDE = 16


@dataclass(frozen=True)
class TimedProduct:
    flops: float
    values: float  #: in operands and result
    seconds: float


def units(device: torch.device) -> list[dict[str, Any]]:
    """The [[peak]] tables, narrow operands first, as dsq takes its kernels."""
    alike: dict[int, list[TimedProduct]] = {}
    mixed: dict[int, list[TimedProduct]] = {}
    for m in CODE_WIDTHS:
        forward, dx, mixed[m] = _layer_times(device, Precision(m, m, m, WIDE))
        alike[m] = forward + dx
    alike[WIDE] = _layer_times(device, Precision(WIDE, 4, 4, WIDE))[0]
    found = [_unit(f"{m} x {m} bits", {"bfp": m}, alike[m]) for m in CODE_WIDTHS]
    found += [_unit(f"{WIDE} x {m} bits", {"bfp": [WIDE, m]}, mixed[m]) for m in CODE_WIDTHS]
    found.append(_unit(f"{WIDE} x {WIDE} bits", {"bfp": WIDE}, alike[WIDE]))
    for name, dtype, holds in (
        ("bf16", torch.bfloat16, {"float": 16}),
        ("fp32", torch.float32, {"float": 32, "bfp": 32, "fixed": 32}),
    ):
        layers = _layer_times(device, None, autocast=dtype is torch.bfloat16)
        found.append(_unit(name, holds, [*chain(*layers), *_batched_times(device, dtype)]))
    return found


def _layer_times(
    device: torch.device, precision: Precision | None, autocast: bool = False
) -> tuple[list[TimedProduct], list[TimedProduct], list[TimedProduct]]:
    """A linear layer's forward, dx and dw, at each of LAYERS; `precision`: of a converted one."""
    times: tuple[list[TimedProduct], ...] = ([], [], [])
    for M, K, N in LAYERS:
        layers = [Linear(K, N, precision=precision) if precision else nn.Linear(K, N) for _ in range(COPIES)]
        inputs = [torch.randn(M, K, device=device) for _ in layers]
        for layer in layers:
            layer.to(device)

        def forward(inputs: list[torch.Tensor] = inputs, layers: list[nn.Linear] = layers) -> list[torch.Tensor]:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return [layer(x) for layer, x in zip(layers, inputs, strict=True)]

        taken_forward = seconds(forward)
        taken_dw = backward_seconds(forward(), [layer.weight for layer in layers])
        for layer in layers:
            layer.requires_grad_(False)  # a backward for dx alone
        wanted = [x.requires_grad_() for x in inputs]
        taken_dx = backward_seconds(forward(), wanted)
        for phase, taken in zip(times, (taken_forward, taken_dx, taken_dw), strict=True):
            phase.append(TimedProduct(2.0 * M * K * N, M * K + K * N + M * N, taken / COPIES))
    return times  # type: ignore[return-value]


def _batched_times(device: torch.device, dtype: torch.dtype) -> Iterator[TimedProduct]:
    for B, M, K, N in BATCHED:
        x, w = (torch.randn(B, rows, K, device=device, dtype=dtype, requires_grad=True) for rows in (M, N))
        y = x @ w.mT
        flops, values = 2.0 * B * M * K * N, B * (M * K + K * N + M * N)
        yield TimedProduct(flops, values, seconds(partial(torch.matmul, x, w.mT)))
        for operand in (x, w):
            yield TimedProduct(flops, values, backward_seconds([y], [operand]))


def _unit(datatype: str, holds: dict[str, Any], times: list[TimedProduct]) -> dict[str, Any]:
    per_flop, per_value, per_call = fitted(times)
    off = [abs(t.flops * per_flop + t.values * per_value + per_call - t.seconds) / t.seconds for t in times]
    unit = {"datatype": datatype, "tflops": 1e-12 / per_flop}
    unit |= {"ns_per_value": 1e9 * per_value} if per_value else {}
    unit |= {"us_per_call": 1e6 * per_call} if per_call else {}
    source = f"measured: {len(times)} products, the fit is off by {np.median(off):.0%} (median), {max(off):.0%} (worst)"
    return unit | {"holds": holds, "source": source}


def fitted(times: list[TimedProduct]) -> tuple[float, float, float]:
    """Seconds an operation, a value and a product: the least squares of relative errors, none of them negative."""
    terms = np.array([[t.flops, t.values, 1.0] for t in times]) / np.array([[t.seconds] for t in times])
    best, least = np.zeros(3), np.inf
    for kept in ([0, *others] for count in range(3) for others in combinations((1, 2), count)):
        found = np.linalg.lstsq(terms[:, kept], np.ones(len(times)), rcond=None)[0]
        error = float(np.square(terms[:, kept] @ found - 1).sum())
        if (found >= 0).all() and found[0] > 0 and error < least:
            best, least = np.zeros(3), error
            best[kept] = found
    return float(best[0]), float(best[1]), float(best[2])
