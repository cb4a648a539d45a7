"""The CPU kernels against copying the same values, and one product by each GEMM."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from analysis.timing import Call, Race, keep_freed_memory, race
from dsq.formats import BFP, FORMATS, FixedPoint, Format, Layout, options
from dsq.kernels import dispatch
from dsq.kernels.cpu.backend import backend as cpu_backend
from dsq.kernels.cpu.library import library
from dsq.kernels.tuning import prepared
from dsq.quantizers import Quantizers

COLUMNS, LARGE, BOX = 4096, 1 << 24, 16
SIZES = (1 << 18, 1 << 20, 1 << 22)  #: values of layers, in cache and beyond
AXES = {"columns": -1, "rows": 0}
#: the formats whose blocks have scales, as bfp has
BLOCKS = [kind for name, kind in FORMATS.items() if "box" in options(name)]


def against_copies(rounds: int) -> Iterator[Race]:
    """Against cloning the same values: large tensors by instruction set, then layers', and other formats against bfp.

    Raises ValueError without the kernels.
    """
    sets = list(library().instruction_sets())
    if not sets:
        raise ValueError("the native kernels are not built: python setup.py build_ext --inplace")
    keep_freed_memory()
    x = torch.randn(LARGE // COLUMNS, COLUMNS)
    where = f"{LARGE:,} float32 values, {torch.get_num_threads()} threads"
    for isa in sets:
        calls = operations(isa, x, BFP(4, BOX))
        if isa == sets[0]:  # what the memory allows: pack at least reads x
            calls["reading alone (sum)"] = x.sum
            calls |= {f"{name}, 8 bits": call for name, call in operations(isa, x, BFP(8, BOX)).items()}
            half = operations(isa, x, BFP(4, BOX), torch.bfloat16)
            calls |= {f"{name}, to bfloat16": call for name, call in half.items() if not name.startswith("pack")}
            calls["quantise fixed point"] = operations(isa, x, FixedPoint(4))["quantise, columns"]
        yield race(f"{isa}, {where}", ("clone", x.clone), calls, rounds)
    for size in SIZES:
        few = torch.randn(size // 512, 512)
        of_each = {kind.name: operations(sets[0], few, kind(4)) for kind in BLOCKS}
        bfp = of_each.pop("bfp")
        yield race(f"bfp, {size:,} float32 values", ("clone", few.clone), bfp, rounds)
        for operation, base in bfp.items():
            calls = {name: calls[operation] for name, calls in of_each.items()}
            yield race(f"{operation}, {size:,} float32 values", ("bfp", base), calls, rounds)


def operations(isa: str, x: Tensor, fmt: Format, out_dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    """Pack, unpack and quantise on both axes, their outputs allocated, as clone's are."""
    calls = dict[str, Call]()
    backend = cpu_backend(isa)
    for axis, dim in AXES.items():
        layout = Layout.of(x.shape, dim)
        codes = backend.pack(x, fmt, layout, None)
        calls[f"pack, {axis}"] = partial(backend.pack, x, fmt, layout, None)
        calls[f"pack stochastic, {axis}"] = partial(backend.pack, x, fmt, layout, 1)
        calls[f"unpack, {axis}"] = partial(backend.unpack, *codes, fmt, layout, out_dtype)
        calls[f"quantise, {axis}"] = partial(backend.quantize, x, fmt, layout, None, out_dtype)
        calls[f"quantise stochastic, {axis}"] = partial(backend.quantize, x, fmt, layout, 1, out_dtype)
    return calls


def product(rounds: int) -> Iterator[Race]:
    """One product x (M, K) by w (N, K) at 4 bits by each GEMM that fits, operands made before and within."""
    matmul, backend = Quantizers.of("[4,4,4,16]").matmuls.output, dispatch.backend_for(torch.device("cpu"))
    for rows, depth, columns in ((1024, 512, 2048), (4096, 1024, 1024)):
        torch.manual_seed(0)
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        calls: dict[str, Call] = {"torch bf16": partial(torch.mm, x.bfloat16(), w.bfloat16().t())}
        for gemm in backend.gemms:
            if gemm.fits(matmul, x.dtype):

                def whole(x: Tensor = x, w: Tensor = w, gemm: Any = gemm) -> Tensor:
                    return gemm.run(matmul, *prepared(gemm, matmul, x, w, backend), None)

                calls[gemm.name] = partial(gemm.run, matmul, *prepared(gemm, matmul, x, w, backend), None)
                calls[f"{gemm.name}, operands made within"] = whole
        title = f"{rows} x {depth} x {columns}, {torch.get_num_threads()} threads"
        yield race(title, ("torch fp32", partial(torch.mm, x, w.t())), calls, rounds)
