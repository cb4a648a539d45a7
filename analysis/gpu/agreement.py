"""Whether the GPU kernels are what a backend must be: every bit of codecs and masks, and exact products."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from analysis.gpu.machine import Machine, this_machine
from dsq.command.table import Record
from dsq.formats import BFP, FixedPoint, Layout
from dsq.kernels.conformance import (
    Case,
    Product,
    cases,
    disagreements,
    mask_disagreements,
    product_disagreements,
    products,
)
from dsq.kernels.triton import codec
from dsq.kernels.triton.backend import TRITON


@dataclass(frozen=True, slots=True)
class Trial:
    """One case of the conformance suite."""

    of: Case | Product
    wide: bool = False  #: with 64-bit offsets


def agreement(machine: Machine) -> Iterator[Record]:
    """A row a case: what differs from the reference, by name ("" where nothing does)."""
    yield from _masks("", machine)
    with _wide_offsets():
        yield from _masks("64-bit offsets: ", machine)
    trials = list(_trials(machine.is_gpu))
    if not machine.is_gpu:
        yield from map(_tried, trials)
        return
    # nearly all of the time goes into compiling, for which a process has one thread
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap_unordered(_tried, trials, chunksize=4)
    yield _beyond_32_bits()


def _trials(on_gpu: bool) -> Iterator[Trial]:
    """All of the suite on a GPU; of it, through the slow interpreter, what shows every branch of the kernels."""
    every = list(cases(TRITON.formats))
    if on_gpu:
        yield from map(Trial, every)
        yield from map(Trial, cases(TRITON.formats, rows=200, columns=1100))
        yield from map(Trial, products())
    else:
        by_power = {BFP, FixedPoint}  # other formats differ from these in their Grid alone
        yield from (Trial(case) for case in every if type(case.format) in by_power)
        yield from map(Trial, [case for case in every if type(case.format) not in by_power][::5])
        yield from map(Trial, [product for product in products() if product.spread and _has_kernel(product)][::14])
    yield from (Trial(case, wide=True) for case in every[:: 7 if on_gpu else 17])


def _has_kernel(product: Product) -> bool:
    """Whether a GEMM in Triton takes the product; the others are PyTorch's, for a GPU."""
    return any(gemm.packed and gemm.fits(product.matmul, torch.float32) for gemm in TRITON.gemms)


def _tried(trial: Trial) -> Record:
    device = this_machine().device
    if isinstance(trial.of, Product):
        return {"case": str(trial.of), "disagree": " ".join(product_disagreements(TRITON, trial.of, device))}
    if not trial.wide:
        return {"case": str(trial.of), "disagree": " ".join(disagreements(TRITON, trial.of, device))}
    with _wide_offsets():
        wrong = disagreements(TRITON, trial.of, device)
    return {"case": f"64-bit offsets: {trial.of}", "disagree": " ".join(wrong)}


def _masks(prefix: str, machine: Machine) -> Iterable[Record]:
    for case, wrong in mask_disagreements(TRITON, machine.device):
        yield {"case": f"{prefix}{case}", "disagree": wrong}


@contextmanager
def _wide_offsets() -> Iterator[None]:
    """Inside, the kernels compute every offset in 64 bits, as they do for tensors of 2**30 values and more."""
    before, codec.WIDE = codec.WIDE, 0
    codec.launch_for.cache_clear()
    try:
        yield
    finally:
        codec.WIDE = before
        codec.launch_for.cache_clear()


def _beyond_32_bits() -> Record:
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
        wrong += [f"{name} (boxes along {axis})" for name, ok in zip(names, alike, strict=True) if not ok]
    return {"case": f"{rows}x{columns} values, bfloat16", "disagree": " ".join(wrong)}
