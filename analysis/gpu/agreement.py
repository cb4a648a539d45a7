"""Whether the GPU kernels are what a backend must be: every bit of codecs and masks, and exact products."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

import dsq
from analysis.gpu import Machine, Trial
from dsq.command import Record
from dsq.formats import BFP, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.backend import GemmKernel
from dsq.kernels.conformance import (
    CodecCase,
    affine_disagreements,
    cases,
    disagreements,
    foreign_disagreements,
    mask_disagreements,
    product_disagreements,
    products,
    same_bits,
)
from dsq.kernels.dispatch import use_backend
from dsq.kernels.reference.backend import REFERENCE, TORCH
from dsq.kernels.triton import codec
from dsq.kernels.triton.backend import TRITON
from dsq.packing import Rounding


def agreement(machine: Machine) -> Iterator[Trial]:
    """A row a case: what differs from the reference, by name ("" if nothing does). What a step needs comes first."""
    device, every = machine.device, list(cases(TRITON))
    by_power = {BFP, FixedPoint}  # other formats differ from these in how they scale alone
    if not machine.is_gpu:  # through the slow interpreter, what shows every branch of the kernels
        rare = [case for case in every if type(case.format) not in by_power]
        every = [case for case in every if type(case.format) in by_power][::2] + rare[::5]
    else:  # no GPU has come to these yet
        yield _trial("beyond 32 bits", _beyond_32_bits)
        yield _trial("affine codes", partial(_joined, affine_disagreements(TRITON, device)))
    yield _trial("a seed on the device", partial(_seed_on_device, device))
    for wide in (False, True):
        yield _trial("masks", partial(_joined, mask_disagreements(TRITON, device)), wide)
    widths = range(2, 17) if machine.is_gpu else (2, 5, 8, 11, 16)
    for kind in sorted(TRITON.formats, key=lambda kind: kind.name):
        of_one = replace(TRITON, formats=frozenset({kind}))
        foreign = partial(_joined, foreign_disagreements(of_one, device, widths))
        yield _trial(f"bytes of {kind.name} that no kernel packed", foreign)
    yield from _codec(device, every)
    for product in products() if machine.is_gpu else ():  # by PyTorch, which on a CPU has no such product of bfloat16
        yield _trial(str(product), partial(product_disagreements, TRITON, product, device))
    for gemm in TRITON.gemms[:: 1 if machine.is_gpu else 2]:
        yield _trial(f"layer by {gemm.name}, pass by pass and product by product", partial(_layers, gemm, machine))
    yield from _codec(device, every[:: 7 if machine.is_gpu else 17], wide=True)
    if machine.is_gpu:
        yield from _codec(device, cases(TRITON, rows=200, columns=1100))


def _trial(name: str, differences: Callable[[], str], wide: bool = False) -> Trial:
    """A trial whose row says what disagrees; ``wide``: with offsets of 64 bits."""

    def row() -> Record:
        with _wide_offsets() if wide else nullcontext():
            return {"disagree": differences()}

    return Trial(f"{name}{', 64-bit offsets' * wide}", row)


def _joined(tried: Iterator[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {differs}" for name, differs in tried if differs)


def _codec(device: torch.device, every: Iterable[CodecCase], wide: bool = False) -> Iterator[Trial]:
    return (_trial(str(case), partial(disagreements, TRITON, case, device), wide) for case in every)


#: formats of q0 to q3, and rounding: one exponent a tensor and none, blocks of one length and of others
_LAYERS: tuple[tuple[tuple[Format, Format, Format, Format], Rounding], ...] = (
    ((BFP(8), SignedNVInt(4), SignedNVInt(4), BFP(8)), "nearest"),
    ((SignedNVInt(4), SignedNVInt(3), BFP(3), SignedNVInt(8)), "stochastic"),
    ((BFP(4, 32), BFP(4), BFP(5, 64), BFP(8, 32)), "nearest"),
    ((FixedPoint(8), FixedPoint(4), FixedPoint(4), FixedPoint(8)), "stochastic"),
)


def _layers(gemm: GemmKernel, machine: Machine) -> str:
    """The passes of a layer, each in one call, give what product by product they give: every bit, but under autocast,
    where y is rounded with its bias once instead of twice, and a CPU sums gradients in another order."""
    device, tried = machine.device, list(itertools.product(_LAYERS, (False, True), (False, True)))
    one_call = replace(TRITON, gemms=tuple(dict.fromkeys((gemm, TORCH))))
    wrong = []
    for (formats, rounding), autocast, turned in tried[:: 1 if machine.is_gpu else 5]:
        quantizers = dsq.Quantizers(*formats, rounding)
        results = []
        for backend in (one_call, replace(one_call, linear=None)):
            torch.manual_seed(0)
            x, dy = torch.randn(3, 13, 72).to(device).requires_grad_(), torch.randn(3, 13, 40).to(device)
            w = torch.randn(72, 40).to(device).t() if turned else torch.randn(40, 72).to(device)
            w, bias = w.requires_grad_(), torch.randn(40).to(device).requires_grad_()
            autocasting = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
            products = nullcontext() if machine.is_gpu else _bfloat16_products()
            with use_backend(backend, device.type), autocasting, products:
                y = dsq.functional.linear(x, w, bias, quantizers)
                results.append((y.detach(), *torch.autograd.grad(y, (x, w, bias), dy.to(y.dtype))))
        (y, *gradients), (y_2, *gradients_2) = results
        alike = torch.allclose(y, y_2, rtol=2**-6, atol=2**-6) if autocast else same_bits(y, y_2)
        of_gradients = _close if autocast and not machine.is_gpu else same_bits
        if not alike or not all(map(of_gradients, gradients, gradients_2)):
            wrong.append(f"{formats[0]}{' autocast' * autocast}{' turned' * turned}")
    return "; ".join(wrong)


def _close(x: Tensor, y: Tensor) -> bool:
    """Return whether ``y`` is ``x`` but for roundings: of sums in another order a few values round to another step."""
    return bool((x - y).norm() <= 2**-6 * x.norm())


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Inside, the CPU has PyTorch's product of bfloat16 in float32, which it lacks."""

    def multiplied(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        with torch._C._DisableAutocast():  # which would round the sums; it leaves a GPU's product as it is
            return torch.matmul(a.float(), b.float()).to(out_dtype)

    mm = patch.object(torch, "mm", multiplied)
    with patch.object(torch.cuda, "is_bf16_supported", lambda **_: True), mm:
        yield


def _seed_on_device(device: torch.device) -> str:
    x, seed, wrong = torch.randn(40, 256), 2**40 + 7, []
    for fmt in (BFP(4), SignedNVInt(3)):
        layout = Layout.of(x.shape, -1)
        expected = REFERENCE.quantize(x, fmt, layout, seed, torch.float32)
        values = codec.quantize(x.to(device), fmt, layout, torch.tensor([seed], device=device), torch.float32)
        wrong += [] if torch.equal(values.cpu(), expected) else [str(fmt)]
    return " ".join(wrong)


@contextmanager
def _wide_offsets() -> Iterator[None]:
    """Inside, the kernels compute every offset in 64 bits, as they do for tensors of 2**30 values and more."""
    afresh = {name: getattr(codec, name).__wrapped__ for name in ("encoder", "_decoder", "_mask_launch")}
    with patch.multiple(codec, WIDE_NUMEL=0, **afresh):
        yield


def _beyond_32_bits() -> str:
    """A tensor of over 2**31 values gives at its end the bytes that its last rows give alone."""
    fmt, rows, columns, last = BFP(4), 2**20 + 16, 2048, 16
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    wrong = []
    for axis, dim in (("columns", -1), ("rows", 0)):
        whole, end = Layout.of(x.shape, dim), Layout.of((last, columns), dim)
        codes, scales = codec.pack(x, fmt, whole, None)
        codes_end, scales_end = codec.pack(x[-last:], fmt, end, None)
        y_end = codec.unpack(codes, scales, fmt, whole, torch.bfloat16)[:, -last:]
        alike = (
            torch.equal(codes[-last:], codes_end),
            torch.equal(scales.view(-1)[-scales_end.numel() :], scales_end.view(-1)),
            torch.equal(y_end, codec.unpack(codes_end, scales_end, fmt, end, torch.bfloat16)),
        )
        names = ("codes", "scales", "unpack")
        wrong += [f"{name} (blocks along {axis})" for name, ok in zip(names, alike, strict=True) if not ok]
    return " ".join(wrong)


_SAMPLE = """
import torch
from dsq.formats import BFP, Layout
from dsq.kernels.triton.backend import TRITON
x = torch.randn(37, 300, device="cuda")
for dim in (0, 1):
    layout = Layout.of(x.shape, dim)
    TRITON.unpack(*TRITON.pack(x, BFP(4), layout, 1), BFP(4), layout, torch.bfloat16)
TRITON.apply_mask(TRITON.pack_mask(x.view(-1), 0.0, 1.0, True), x.view(-1))
torch.cuda.synchronize()
"""


def sanitizer(machine: Machine) -> Iterator[Trial]:
    """A sample of the codecs and masks under compute-sanitizer, if the machine has it."""
    tool = shutil.which("compute-sanitizer")
    for check in ("memcheck", "racecheck") if tool and machine.is_gpu else ():
        command = [str(tool), "--tool", check, "--error-exitcode", "9", sys.executable, "-c", _SAMPLE]
        yield Trial(check, partial(_clean, command))


def _clean(command: list[str]) -> Record:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if "=====" in line][-1:]
    return {"disagree": "" if done.returncode == 0 else f"status {done.returncode}", "said": " ".join(last)}
