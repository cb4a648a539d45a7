"""Whether a backend gives the reference's bits: the cases to try, tensors full of edges, and the comparison."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from dsq.kernels import REFERENCE, Backend, Grid, Layout
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Case:
    """One tensor, one grid, one way of rounding."""

    shape: tuple[int, ...]
    dim: int
    grid: Grid
    dtype: torch.dtype = torch.float32  #: of the tensor
    out: torch.dtype = torch.float32  #: of the quantised and the unpacked values
    seed: int | None = None  #: None rounds to nearest

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        box = f"box {self.grid.box}" if self.grid.box else f"fixed {self.grid.exponent}"
        types = "->".join(str(t).removeprefix("torch.") for t in (self.dtype, self.out))
        return f"{shape} dim {self.dim} {self.grid.bits} bits {box} {types} seed {self.seed}"


def cases(rows: int = 21, columns: int = 140) -> Iterator[Case]:
    """Every width, axis, rounding and type, and the shapes that tiles, boxes and bytes do not divide."""
    ragged, even = (rows, columns), (2, 16 * (rows // 16), 128 * max(columns // 128, 1))
    for bits in range(2, 17):
        into, out = FLOATS[bits % 3], FLOATS[(bits // 3) % 3]
        for dim in (-1, -2):
            yield Case(ragged, dim, Grid(bits, 16), into, out, seed=bits)
            yield Case(even, dim, Grid(bits, 16), out, into)
    for bits in (2, 4, 8, 16):
        yield Case(even, -1, Grid(bits, 16), seed=2**40 + bits)
        yield Case((rows, 8 * columns), -1, Grid(bits, 8), torch.bfloat16, torch.bfloat16)
    for box in (1, 2, 5, 8, 12, 32, 64, 100, 128, 200):
        yield Case(ragged, -1, Grid(4, box), seed=-box)
        yield Case(ragged, -2, Grid(3, box), torch.bfloat16)
    for exponent in (None, 3, -127, 127):
        yield Case(ragged, -1, Grid(8, 0, exponent))
        yield Case((3, *ragged), 0, Grid(16, 0, exponent), torch.float16, torch.bfloat16, seed=1)
        yield Case(even, -1, Grid(4, 0, exponent), torch.bfloat16, torch.float16, seed=2)
    for shape, dim in [
        ((), -1),
        ((1,), 0),
        ((300,), 0),
        ((rows, 1), 0),
        ((1, columns), 0),
        ((0, 16), -1),
        ((16, 0), 0),
    ]:
        yield Case(shape, dim, Grid(4, 16))
        yield Case(shape, dim, Grid(5, 0), seed=3)
    for dim in range(3):
        yield Case((2, *ragged), dim, Grid(4, 16), seed=dim)
    yield Case((4, rows, 2, 40), 1, Grid(4, 16), torch.float64, torch.float64)
    yield Case((rows, 40), 1, Grid(4, 0), torch.float64, torch.float64)


def edges(case: Case) -> Tensor:
    """A tensor whose patches hold ordinary values over many binades, ties, subnormals, zeros of both signs, the largest
    values, and NaN and infinities (one patch in eight, so that most boxes are finite)."""
    generator = torch.Generator().manual_seed(case.grid.bits)
    layout = Layout.of(case.shape, -1)
    uniform = torch.rand(layout.rows, layout.columns, generator=generator, dtype=torch.float64)
    limits = torch.finfo(torch.float32 if case.dtype == torch.float64 else case.dtype)
    lowest, highest = torch.tensor([limits.tiny * 0.9, limits.max]).double().log2().floor().tolist()

    row, column = (torch.arange(n).div(p, rounding_mode="floor") for n, p in zip(uniform.shape, (5, 48), strict=True))
    patch = (row[:, None] * 3 + column[None, :] * 5) % 8
    binade = lowest + (row[:, None] * 37 + column[None, :] * 61) % int(highest - lowest)
    centred = 2 * uniform - 1
    ordinary = centred * torch.exp2(binade)
    ties = (centred * 2**case.grid.bits).round() * torch.exp2(binade.clamp(max=highest - 16))
    subnormal = (centred * 300).round() * limits.smallest_normal * limits.eps
    zero = torch.copysign(torch.zeros_like(centred), centred)
    largest = torch.where(uniform < 0.5, limits.max, limits.min)
    broken = torch.where(uniform < 0.05, torch.nan, torch.where(uniform > 0.95, torch.inf, centred))
    x = torch.stack([ordinary, ties, subnormal, zero, largest, broken, ordinary, ties]).gather(0, patch[None])[0]
    if case.grid.box == 0:  # one NaN would hide every other value
        x = torch.where(x.isfinite(), x, 0.0)
    return x.reshape(case.shape).to(case.dtype)


def disagreements(backend: Backend, case: Case, device: torch.device) -> list[str]:
    """The operations in which ``backend`` on ``device`` differs from the reference on the CPU: empty where every bit
    agrees."""
    x, layout = edges(case), Layout.of(case.shape, case.dim)
    codes, exponents = REFERENCE.pack(x, case.grid, layout, case.seed)
    y = REFERENCE.quantize(x, case.grid, layout, case.seed, case.out)
    z = REFERENCE.unpack(codes, exponents, case.grid, layout, case.out)

    on_device = x.to(device)
    found_codes, found_exponents = backend.pack(on_device, case.grid, layout, case.seed)
    found_y = backend.quantize(on_device, case.grid, layout, case.seed, case.out)
    found_z = backend.unpack(codes.to(device), exponents.to(device), case.grid, layout, case.out)
    pairs = [
        ("codes", codes, found_codes),
        ("exponents", exponents, found_exponents),
        ("quantize", y, found_y),
        ("unpack", z, found_z),
    ]
    return [name for name, expected, found in pairs if not same_bits(expected, found.cpu())]


def mask_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Of masks: what was tried, and the operations in which ``backend`` differs from the reference ("" for none)."""
    for dtype in (*FLOATS, torch.float64, torch.bool):
        for count in (0, 1, 8, 31, 2048, 4100):
            x = edges(Case((count,), -1, Grid(4, 16), torch.float32 if dtype is torch.bool else dtype)).to(dtype)
            for low, high, nan_is_open in ((0.0, math.nan, True), (-0.1, 0.1, False), (-math.inf, 0.0, True)):
                bits = REFERENCE.pack_mask(x, low, high, nan_is_open)
                found = backend.pack_mask(x.to(device), low, high, nan_is_open)
                y = REFERENCE.unpack_mask(bits, count, low, 1 / 0.9, dtype)
                found_y = backend.unpack_mask(bits.to(device), count, low, 1 / 0.9, dtype)
                pairs = [("pack", bits, found), ("unpack", y, found_y)]
                if dtype is not torch.bool:
                    found_x = backend.apply_mask(bits.to(device), x.to(device))
                    pairs.append(("apply", REFERENCE.apply_mask(bits, x), found_x))
                wrong = " ".join(name for name, expected, got in pairs if not same_bits(expected, got.cpu()))
                yield f"mask of {count} {dtype} between {low} and {high}", wrong


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, type and every bit, but for the payload of a NaN, which differs between devices."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(t.isnan(), 0, t).view(integers) for t in (a, b))
    return torch.equal(a, b)
