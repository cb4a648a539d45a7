"""Quantise, pack and unpack: every width, axis, rounding and dtype, on values full of edges."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.formats import FixedPoint, Format, Layout, options
from dsq.kernels.backend import Backend
from dsq.kernels.conformance.bits import DTYPES, differing
from dsq.kernels.reference.backend import REFERENCE


@dataclass(frozen=True, slots=True)
class Case:
    """One tensor, one format, one rounding."""

    shape: tuple[int, ...]
    dim: int
    format: Format
    dtype: torch.dtype = torch.float32  #: of the tensor
    out: torch.dtype = torch.float32  #: of the quantised and the unpacked values
    seed: int | None = None  #: None rounds to nearest

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        types = "->".join(str(t).removeprefix("torch.") for t in (self.dtype, self.out))
        return f"{shape} dim {self.dim} {self.format} {types} seed {self.seed}"


def cases(formats: Iterable[type[Format]], rows: int = 21, columns: int = 140) -> Iterator[Case]:
    """Of each format every width, axis, rounding and type, and the shapes that tiles, boxes and bytes do not divide."""
    for kind in sorted(formats, key=lambda kind: kind.name):
        if "box" in options(kind.name):
            yield from _cases_of_boxes(kind, rows, columns)
        elif kind is FixedPoint:
            yield from _cases_of_one_box(rows, columns)


def _cases_of_boxes(format: Callable[..., Format], rows: int, columns: int) -> Iterator[Case]:
    ragged, even = (rows, columns), (2, 16 * (rows // 16), 128 * max(columns // 128, 1))
    for bits in range(2, 17):
        into, out = DTYPES[bits % 3], DTYPES[(bits // 3) % 3]
        for dim in (-1, -2):
            yield Case(ragged, dim, format(bits, 16), into, out, seed=bits)
            yield Case(even, dim, format(bits, 16), out, into)
    for bits in (2, 4, 8, 16):
        yield Case(even, -1, format(bits, 16), seed=2**40 + bits)
        yield Case((rows, 8 * columns), -1, format(bits, 8), torch.bfloat16, torch.bfloat16)
    for box in (1, 2, 5, 8, 12, 32, 64, 100, 128, 200):
        yield Case(ragged, -1, format(4, box), seed=-box)
        yield Case(ragged, -2, format(3, box), torch.bfloat16)
    odd = (((), -1), ((1,), 0), ((300,), 0), ((rows, 1), 0), ((1, columns), 0), ((0, 16), -1), ((16, 0), 0))
    for shape, dim in odd:
        yield Case(shape, dim, format(4, 16))
    for dim in range(3):
        yield Case((2, *ragged), dim, format(4, 16), seed=dim)
    yield Case((4, rows, 2, 40), 1, format(4, 16), torch.float64, torch.float64)


def _cases_of_one_box(rows: int, columns: int) -> Iterator[Case]:
    for exponent in (None, 3, -127, 127):

        def format(bits: int, exponent: int | None = exponent) -> Format:
            return FixedPoint(bits, None if exponent is None else bits - 2 - exponent)

        yield Case((rows, columns), -1, format(8))
        yield Case((3, rows, columns), 0, format(16), torch.float16, torch.bfloat16, seed=1)
        yield Case((rows, 128), -1, format(4), torch.bfloat16, torch.float16, seed=2)
    for shape in ((), (1,), (300,), (rows, 1), (1, columns), (0, 16), (16, 0)):
        yield Case(shape, -1, FixedPoint(5), seed=3)
    yield Case((rows, 40), 1, FixedPoint(4), torch.float64, torch.float64)


def edges(case: Case) -> Tensor:
    """A tensor whose patches hold ordinary values over many binades, ties, subnormals, zeros of both signs, the largest
    values, and NaN and infinities (one patch in eight, so that most boxes are finite)."""
    generator = torch.Generator().manual_seed(case.format.bits)
    layout = Layout.of(case.shape, -1)
    uniform = torch.rand(layout.rows, layout.columns, generator=generator, dtype=torch.float64)
    limits = torch.finfo(torch.float32 if case.dtype == torch.float64 else case.dtype)
    lowest, highest = torch.tensor([limits.tiny * 0.9, limits.max]).double().log2().floor().tolist()

    row, column = (torch.arange(n).div(p, rounding_mode="floor") for n, p in zip(uniform.shape, (5, 48), strict=True))
    patch = (row[:, None] * 3 + column[None, :] * 5) % 8
    binade = lowest + (row[:, None] * 37 + column[None, :] * 61) % int(highest - lowest)
    centred = 2 * uniform - 1
    ordinary = centred * torch.exp2(binade)
    ties = (centred * 2**case.format.bits).round() * torch.exp2(binade.clamp(max=highest - 16))
    subnormal = (centred * 300).round() * limits.smallest_normal * limits.eps
    zero = torch.copysign(torch.zeros_like(centred), centred)
    largest = torch.where(uniform < 0.5, limits.max, limits.min)
    broken = torch.where(uniform < 0.05, torch.nan, torch.where(uniform > 0.95, torch.inf, centred))
    x = torch.stack([ordinary, ties, subnormal, zero, largest, broken, ordinary, ties]).gather(0, patch[None])[0]
    if case.format.box == 0:  # one NaN would hide every other value
        x = torch.where(x.isfinite(), x, 0.0)
    return x.reshape(case.shape).to(case.dtype)


def disagreements(backend: Backend, case: Case, device: torch.device, x: Tensor | None = None) -> list[str]:
    """The operations in which ``backend`` on ``device`` differs from the reference on the CPU: empty where every bit
    agrees. ``x``: a tensor of the case's shape and dtype; None: ``edges``."""
    x, layout = edges(case) if x is None else x, Layout.of(case.shape, case.dim)
    codes, scales = REFERENCE.pack(x, case.format, layout, case.seed)
    y = REFERENCE.quantize(x, case.format, layout, case.seed, case.out)
    z = REFERENCE.unpack(codes, scales, case.format, layout, case.out)

    on_device = x.to(device)
    found_codes, found_scales = backend.pack(on_device, case.format, layout, case.seed)
    found_y = backend.quantize(on_device, case.format, layout, case.seed, case.out)
    found_z = backend.unpack(codes.to(device), scales.to(device), case.format, layout, case.out)
    return differing(
        ("codes", codes, found_codes),
        ("scales", scales, found_scales),
        ("quantize", y, found_y),
        ("unpack", z, found_z),
    )
