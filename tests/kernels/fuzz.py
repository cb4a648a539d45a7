"""A fuzzer of the kernels: random shapes, strides, offsets, widths, types, threads and hooks against the reference.

    python -m tests.kernels.fuzz --minutes 10        (.ci/fuzz PYTHON 10)

A case depends on its number alone: --first NUMBER --minutes 0 runs it. The number of the current case is in a file,
whose name is printed first, because a kernel may end the process.
"""

import argparse
import ctypes
import math
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import dsq
from dsq.formats import FORMATS, Format, format_class, options
from dsq.functional import linear
from dsq.kernels import dispatch
from dsq.kernels.backend import Groups, MovingRanges
from dsq.kernels.conformance import GRID_FORMATS, same_bits
from dsq.kernels.cpu.backend import load
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import affine_pack, affine_unpack, apply_mask, pack_mask, relu, unpack_mask
from dsq.kernels.reference.backend import REFERENCE
from dsq.quantizers import Quantizers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.0**-126, 2.0**-140, 3e38, 65504.0, 1e-8])


def _format(draw: random.Random) -> Format:
    if draw.random() < 0.5:
        return draw.choice(GRID_FORMATS)
    name = draw.choice(list(FORMATS))
    block_size = (
        {"block_size": draw.choice([1, 2, 3, 8, 16, 16, 16, 32, 37, 64])} if "block_size" in options(name) else {}
    )
    point = {"fraction_bits": draw.choice([None, 0, 4, 12])} if name == "fixed" else {}
    return format_class(name)(draw.randint(2, 16), **block_size, **point)


def _values(draw: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    x = torch.randn(shape, generator=generator) * 2.0 ** draw.choice([0, 0, 0, -130, -20, 20, 100])
    if draw.random() < 0.3:
        edges = EDGES[torch.randint(len(EDGES), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.3, edges, x)
    if draw.random() < 0.1:
        not_finite = torch.rand(shape, generator=generator) < 0.02
        x = x.masked_fill(not_finite, draw.choice([torch.nan, torch.inf]))
    return x


def _view(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape that may have any strides and offset."""
    kind = draw.choice(["plain", "offset", "step", "permuted", "expanded"])
    if kind == "offset":
        count = math.prod(shape)
        return _values(draw, count + 3).to(dtype)[draw.randint(0, 3) :][:count].view(shape)
    if kind == "step":
        return _values(draw, *(2 * size for size in shape)).to(dtype)[tuple(slice(0, None, 2) for _ in shape)]
    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        inverse = sorted(range(len(shape)), key=order.__getitem__)
        return _values(draw, *(shape[axis] for axis in order)).to(dtype).permute(inverse)
    if kind == "expanded" and len(shape) > 1:
        return _values(draw, 1, *shape[1:]).to(dtype).expand(shape)
    return _values(draw, *shape).to(dtype)


def _check(name: str, actual: Tensor, expected: Tensor) -> None:
    if not same_bits(actual, expected):
        raise AssertionError(f"{name} differs from the reference")


def codec(draw: random.Random) -> None:
    """Quantize, pack and unpack give the reference's bits."""
    shape = tuple(draw.choice([0, 1, 2, 3, 7, 8, 16, 17, 24, 33, 48, 64, 129]) for _ in range(draw.randint(1, 3)))
    x, fmt, dim = _view(draw, shape, draw.choice(DTYPES)), _format(draw), draw.randrange(-len(shape), len(shape))
    rounding = (draw.choice(["nearest", "stochastic"]), draw.getrandbits(63))
    packed, quantized = dsq.pack(x, fmt, dim, *rounding), dsq.quantize(x, fmt, dim, *rounding)
    with dispatch.use_backend(REFERENCE):
        reference = dsq.pack(x, fmt, dim, *rounding)
    _check("codes", packed.codes, reference.codes)
    _check("scales", packed.scales, reference.scales)
    dtype = draw.choice(DTYPES)
    with dispatch.use_backend(REFERENCE):
        expected = reference.unpack(dtype), reference.unpack()
    _check("unpack", packed.unpack(dtype), expected[0])
    _check("quantize", quantized, expected[1])


def masks(draw: random.Random) -> None:
    """Packed masks and ReLU give the reference's bits."""
    x = _view(draw, (draw.randint(0, 300), draw.randint(1, 9)), draw.choice(DTYPES)).contiguous()
    bounds = (draw.choice([0.0, -1.0, -torch.inf]), draw.choice([1.0, 6.0, torch.inf]), draw.random() < 0.5)
    results = pack_mask(x, *bounds), *relu(x)
    with dispatch.use_backend(REFERENCE):
        references = pack_mask(x, *bounds), *relu(x)
    for index, (actual, expected) in enumerate(zip(results, references, strict=True)):
        _check(f"mask {index}", actual, expected)
    is_open = unpack_mask(results[0], x.numel(), x.dtype).view(x.shape) > 0
    _check("apply_mask", apply_mask(results[0], x), torch.where(is_open, x, 0))
    p, seed = draw.random(), draw.getrandbits(32)
    torch.manual_seed(seed)
    expected = torch.empty(x.shape).bernoulli_(p), torch.rand(3)
    torch.manual_seed(seed)
    actual = dispatch.bernoulli(x.shape, p).float(), torch.rand(3)
    for name, one, other in zip(("draws", "the next draws"), actual, expected, strict=True):
        _check(name, one, other)


def affine(draw: random.Random) -> None:
    """Affine codes in the range of each group, new or running, give the reference's bits."""
    run, number, bits = draw.choice([1, 3, 16, 100, 256]), draw.randint(1, 40), draw.randint(1, 8)
    runs = draw.random() < 0.5
    count = run * number * (draw.randint(1, 3) if runs else 1) - draw.randrange(run)
    x, groups = _view(draw, (count,), draw.choice(DTYPES)), Groups(run, number)
    state, decay = torch.rand(2, number, dtype=torch.promote_types(x.dtype, torch.float32)), draw.random()
    ranges, reference_ranges = (MovingRanges(state.clone(), decay) if runs else None for _ in range(2))
    seed, dtype = draw.choice([None, draw.getrandbits(63)]), draw.choice(DTYPES)
    packed = affine_pack(x, bits, groups, ranges, seed)
    unpacked = affine_unpack(packed, bits, groups, count, dtype)
    with dispatch.use_backend(REFERENCE):
        reference = affine_pack(x, bits, groups, reference_ranges, seed)
        expected = affine_unpack(reference, bits, groups, count, dtype)
    _check("affine codes", packed.codes, reference.codes)
    if ranges is not None and reference_ranges is not None:
        _check("running ranges", ranges.alpha_beta, reference_ranges.alpha_beta)
    _check("affine unpack", unpacked, expected)


def _layer(draw: random.Random) -> tuple[Tensor, Tensor, Tensor | None, Quantizers]:
    T, K, N = (draw.choice([1, 2, 5, 16, 31, 64, 100, 130]) for _ in range(3))
    dtype = draw.choice(DTYPES) if draw.random() < 0.3 else torch.float32
    x, w = (_view(draw, shape, torch.float32).clamp(-1e4, 1e4).to(dtype) for shape in ((T, K), (N, K)))
    bias = torch.randn(N).to(dtype) if draw.random() < 0.5 else None
    name = draw.choice(["bfp", "bfp", "snvint", "fixed"])
    block_size = {} if name == "fixed" else {"block_size": draw.choice([1, 8, 16, 16, 16, 32, 64])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = dsq.DSQConfig([dsq.Precision(*(draw.randint(2, 20) for _ in range(4)))], format=name, **block_size)
    return x.detach(), w.detach(), bias, config.at(0)


def layers(draw: random.Random) -> None:
    """A linear layer gives the reference's y and dw, up to the rounding of the sums."""
    x, w, bias, q = _layer(draw)
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, bias, q)
    dy = torch.randn(y.shape).to(y.dtype)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    with dispatch.use_backend(REFERENCE):
        expected = linear(x, w, bias, q)
        edx, edw = torch.autograd.grad(expected, (x, w), dy)
    slack = 1e-5 if x.dtype == torch.float32 else 2e-2
    axes = (-1, 0)
    bias_max = torch.zeros(()) if bias is None else bias.abs().float().amax()
    for name, actual, reference, scale in (
        ("y", y, expected, x.abs().float().amax() * w.abs().float().amax() * x.shape[1] + bias_max),
        ("dw", dw, edw, dy.abs().float().amax() * x.abs().float().amax() * x.shape[0]),
    ):
        error = (actual.float() - reference.float()).abs().amax(axes).item()
        if reference.isfinite().all() and error > slack * scale.item() + 1e-30:
            raise AssertionError(f"{name} differs from the reference by more than the rounding of its sums")
    assert dx.shape == edx.shape


_CHANGES: dict[str, Callable[[Tensor], object]] = {
    "fewer rows": lambda t: t[: len(t) // 2],
    "none": lambda t: t[:0],
    "another dtype": lambda t: t.to(torch.int16),
    "transposed": lambda t: t.T if t.dim() == 2 else t,
    "copied with strides": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "same": lambda t: t.clone(),
    "other bytes": lambda t: torch.randint_like(t, 256),
    "flat": lambda t: t.flatten(),
    "no tensor": lambda t: None,
}


def hooks(draw: random.Random) -> None:
    """Saved-tensor hooks that return other tensors lead to a result or an error, never to a read out of bounds."""
    x, w, bias, q = _layer(draw)
    change = _CHANGES[draw.choice(sorted(_CHANGES))]
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: change(t) if t.dtype == torch.uint8 else t):
        y = linear(x, w.requires_grad_(), bias, q)
    try:
        y.sum().backward()
    except (ValueError, RuntimeError, TypeError):
        return


def _heads(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose rows are contiguous. The rows have any order and gaps, and may be one row expanded."""
    order, gap = draw.sample(range(3), 3), draw.choice([0, 0, 1, 5])
    sizes = [shape[axis] if draw.random() < 0.9 else 1 for axis in order]
    x = torch.randn(*sizes, gap + shape[3]) * draw.choice([0.1, 1, 3])
    return x.to(dtype)[..., gap:].permute(*map(order.index, range(3)), 3).expand(shape)


def attention(draw: random.Random) -> None:
    """Fused attention and its gradients are those of the equations in float64, up to the rounding of float32's sums."""
    heads = draw.randint(1, 3), draw.randint(1, 4)
    L, S = (draw.choice([1, 2, 5, 6, 7, 16, 17, 33, 64, 97, 200]) for _ in range(2))
    D = draw.choice([1, 3, 16, 20, 33, 64, 65])
    dtype, causal = draw.choice([torch.float32, torch.bfloat16]), draw.random() < 0.5
    q, k, v, dy = (_heads(draw, (*heads, rows, D), dtype) for rows in (L, S, S, L))
    scale = draw.choice([D**-0.5, 0.02, 1.0])
    qkv_float64 = [x.double().requires_grad_() for x in (q, k, v)]
    scores = qkv_float64[0] @ qkv_float64[1].mT * scale
    hidden = ~torch.ones(L, S, dtype=torch.bool).tril() if causal else torch.zeros(L, S, dtype=torch.bool)
    y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ qkv_float64[2]
    expected = y, *torch.autograd.grad(y, qkv_float64, dy.double())
    qkv = [x.requires_grad_() for x in (q, k, v)]
    with dsq.fused_attention():
        y = F.scaled_dot_product_attention(*qkv, is_causal=causal, scale=scale)
        actual = y, *torch.autograd.grad(y, qkv, dy)
    rounding = (8 + max(L, S, D)) * 2.0**-23 if dtype == torch.float32 else 2.0**-6  # equal terms err alike
    unit = (1 + scores.abs().amax().item()) * rounding
    q_max, k_max, v_max, dy_max = (x.abs().amax().item() for x in (q, k, v, dy))
    ds_max = 2 * D * dy_max * v_max * scale
    bounds = {"y": v_max, "dq": ds_max * k_max, "dk": ds_max * q_max * L, "dv": dy_max * L}
    for (name, bound), y_or_gradient, exact in zip(bounds.items(), actual, expected, strict=True):
        if not (y_or_gradient - exact).abs().amax().item() <= unit * bound:
            raise AssertionError(f"attention's {name} is not that of its equations")


KINDS = (codec, codec, codec, affine, masks, layers, layers, attention, hooks)


def run_case(number: int) -> str:
    """Run a case and return its kind. Raises AssertionError if a kernel differs from the reference."""
    draw = random.Random(number)
    torch.manual_seed(number)
    torch.set_num_threads(draw.choice([1, 1, 2, 3, 8]))
    kind = draw.choice(KINDS)
    kind(draw)
    return kind.__name__


def _use_threads(path: Path) -> None:
    """Let the kernels run on the threads of the compiled threads.cpp instead of OpenMP's."""
    threads = ctypes.CDLL(str(path))
    functions = (ctypes.cast(function, ctypes.c_void_p).value for function in (threads.parallel, threads.thread_number))
    library().c.dsq_use_threads(*functions)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--threads", type=Path, help="threads.cpp, compiled: for ThreadSanitizer (.ci/data-races)")
    arguments = parser.parse_args()
    load()  # an ImportError if the kernels were not built
    if arguments.threads:
        _use_threads(arguments.threads)
    number_file = Path(tempfile.gettempdir(), f"dsq-fuzz-{os.getpid()}")
    print(f"{number_file} has the number of the case, also if the case ends the process", flush=True)
    counts, number, end = Counter[str](), arguments.first, time.monotonic() + 60 * arguments.minutes
    while not counts or time.monotonic() < end:
        number_file.write_text(str(number))
        counts[run_case(number)] += 1
        number += 1
    number_file.unlink()
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items()))
    print(f"{sum(counts.values()):,} cases from {arguments.first}: {kinds}")


if __name__ == "__main__":
    main()
