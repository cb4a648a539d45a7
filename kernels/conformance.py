"""What every backend must pass: the reference's bits for codecs and masks, products exact to the order of their sums.

    from dsq.kernels.conformance import failures
    assert not list(failures(backend, torch.device("cpu")))

Tests, analysis/gpu and backends from outside the package all take their cases from here.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout, SignedBFP, SignedNVInt, options
from dsq.kernels.backend import (
    DTYPES,
    AffineCodes,
    Backend,
    Codes,
    Dtypes,
    Groups,
    Layer,
    LinearMatMuls,
    MatMul,
    Operand,
    Running,
)
from dsq.kernels.reference.backend import FLOAT64, REFERENCE, TORCH
from dsq.kernels.tuning import prepared


def failures(backend: Backend, device: torch.device) -> Iterator[str]:
    """Everything in which ``backend`` on ``device`` is not what a backend must be; nothing where it conforms."""
    for case in cases(backend.formats):
        wrong = disagreements(backend, case, device)
        if wrong:
            yield f"{case}: {' '.join(wrong)}"
    for trials in (
        foreign_disagreements(backend, device),
        mask_disagreements(backend, device),
        affine_disagreements(backend, device),
        linear_disagreements(backend, device),
    ):
        yield from (f"{what}: {differs}" for what, differs in trials if differs)
    for product in products():
        wrong = product_disagreements(backend, product, device)
        if wrong:
            yield f"{product}: {' '.join(wrong)}"


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


def differing(*results: tuple[str, Tensor, Tensor]) -> list[str]:
    """The names of those, of (name, expected, what the backend gave), in which the two differ."""
    return [name for name, expected, found in results if not same_bits(expected, found.cpu())]


# ---- quantise, pack and unpack: every width, axis, rounding and dtype, on values full of edges


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
    """Yield each format's widths, axes, roundings and types, and shapes that tiles, boxes and bytes do not divide."""
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
    yield Case((4, rows, 2, 40), 1, format(4, 16))


def _cases_of_one_box(rows: int, columns: int) -> Iterator[Case]:
    for exponent in (None, 3, -127, 127):

        def format(bits: int, exponent: int | None = exponent) -> Format:
            return FixedPoint(bits, None if exponent is None else bits - 2 - exponent)

        yield Case((rows, columns), -1, format(8))
        yield Case((3, rows, columns), 0, format(16), torch.float16, torch.bfloat16, seed=1)
        yield Case((rows, 128), -1, format(4), torch.bfloat16, torch.float16, seed=2)
    for shape in ((), (1,), (300,), (rows, 1), (1, columns), (0, 16), (16, 0)):
        yield Case(shape, -1, FixedPoint(5), seed=3)
    yield Case((rows, 40), 1, FixedPoint(4))


def edges(case: Case) -> Tensor:
    """A tensor whose patches hold ordinary values over many binades, ties, subnormals, zeros of both signs, the largest
    values, and NaN and infinities (one patch in eight, so that most boxes are finite)."""
    generator = torch.Generator().manual_seed(case.format.bits)
    layout = Layout.of(case.shape, -1)
    uniform = torch.rand(layout.rows, layout.columns, generator=generator, dtype=torch.float64)
    limits = torch.finfo(case.dtype)
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


#: the lowest and one more than the highest: any bytes, three times, as a tensor has one exponent; or one byte alone
_BYTES = ((0, 256),) * 3 + ((0, 1), (127, 128), (128, 129), (255, 256))


def foreign_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Unpack codes and scales that no kernel packed, as hooks and damaged files give them: yield what was tried, and
    "unpack" if ``backend`` makes other values of them than the reference."""
    generator = torch.Generator().manual_seed(0)
    for kind in sorted(backend.formats & {BFP, FixedPoint, SignedBFP, SignedNVInt}, key=lambda kind: kind.name):
        for bits, dim, (low, high) in itertools.product(range(2, 17), (0, 1), _BYTES):
            layout, fmt = Layout.of((19, 70), dim), kind(bits)
            shapes = layout.code_shape(bits), fmt.scale_shape(layout)
            codes, scales = (torch.randint(low, high, s, generator=generator, dtype=torch.uint8) for s in shapes)
            expected = REFERENCE.unpack(codes, scales, fmt, layout, torch.float32)
            found = backend.unpack(codes.to(device), scales.to(device), fmt, layout, torch.float32)
            wrong = " ".join(differing(("unpack", expected, found)))
            yield f"foreign bytes from {low} to {high - 1} of {fmt} dim {dim}", wrong


# ---- masks and affine codes


def mask_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the masks: yield what was tried, and where ``backend`` differs from the reference ("": nowhere)."""
    for dtype in (*DTYPES, torch.bool):
        for count in (0, 1, 8, 31, 2048, 4100):
            x = edges(Case((count,), -1, BFP(4, 16), torch.float32 if dtype is torch.bool else dtype)).to(dtype)
            for low, high, nan_is_open in ((0.0, math.nan, True), (-0.1, 0.1, False), (-math.inf, 0.0, True)):
                bits = REFERENCE.pack_mask(x, low, high, nan_is_open)
                found = backend.pack_mask(x.to(device), low, high, nan_is_open)
                y = REFERENCE.unpack_mask(bits, count, low, 1 / 0.9, dtype)
                found_y = backend.unpack_mask(bits.to(device), count, low, 1 / 0.9, dtype)
                pairs = [("pack", bits, found), ("unpack", y, found_y)]
                if dtype is not torch.bool:
                    found_x = backend.apply_mask(bits.to(device), x.to(device))
                    pairs.append(("apply", REFERENCE.apply_mask(bits, x), found_x))
                yield f"mask of {count} {dtype} between {low} and {high}", " ".join(differing(*pairs))


#: (values, groups) of affine codes: runs that tiles divide and others, several groups a tile, a short last run
_AFFINE = (
    (1, Groups(1, 1)),
    (4096, Groups(64, 8)),
    (4096, Groups(512, 8)),
    (3 * 7 * 24, Groups(24, 7)),
    (900, Groups(1, 300)),
    (5000, Groups(256, 20)),
    (20000, Groups(100, 200)),
    (16500, Groups(3, 5500)),
)


def affine_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try affine codes: yield what was tried, and in which operations ``backend`` differs from the reference."""
    for (count, groups), bits, dtype in itertools.product(_AFFINE, range(1, 9), DTYPES):
        x, seed = edges(Case((count,), -1, BFP(4, 16), dtype)), None if bits % 3 == 0 else 2**33 + bits
        before = torch.linspace(0.01, 3, 2 * groups.number).view(2, -1)
        before[:, ::3] = torch.nan  # groups that no tensor was seen of
        own = bits % 2 == 0 and groups.run * groups.number >= count  # else in running ranges: values lie outside
        running = None if own else Running(before.clone(), 0.9)
        packed = REFERENCE.affine_pack(x, bits, groups, running, seed)
        y = REFERENCE.affine_unpack(packed, bits, groups, count, dtype)

        moving = None if running is None else Running(before.to(device), 0.9)
        found = backend.affine_pack(x.to(device), bits, groups, moving, seed)
        moved = AffineCodes(*(part.to(device) for part in packed))
        found_y = backend.affine_unpack(moved, bits, groups, count, dtype)
        results = [
            ("codes", packed.codes, found.codes),
            ("ranges", packed.ranges, found.ranges),
            ("unpack", y, found_y),
        ]
        if running is not None and moving is not None:
            results.append(("running ranges", running.alpha_beta, moving.alpha_beta))
        # + 0: which of its zeros is a group's smallest value is not said
        wrong = differing(*((name, expected + 0, got + 0) for name, expected, got in results))
        yield f"affine codes of {count} {dtype} in {groups}, {bits} bits, seed {seed}", " ".join(wrong)


# ---- products of two matrices: exact but for float32's rounding of their sums

_SIGNED = ((SignedBFP, SignedBFP), (SignedNVInt, SignedNVInt), (BFP, SignedNVInt), (SignedNVInt, BFP), (BFP, SignedBFP))
#: formats of the two operands of products, and their widths
_OPERANDS: tuple[tuple[tuple[Callable[..., Format], ...], tuple[int, int]], ...] = (
    *itertools.product(((BFP, BFP), (FixedPoint, FixedPoint)), ((2, 2), (4, 4), (8, 5), (9, 9), (16, 4), (3, 16))),
    *itertools.product(_SIGNED, ((2, 3), (4, 4), (8, 8), (16, 4))),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One product of quantised operands: a (rows, depth) by b (depth, columns)."""

    rows: int
    depth: int
    columns: int
    matmul: MatMul
    spread: int = 0  #: binades over which neighbouring boxes lie; some boxes are zeros then, and a value is NaN

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.depth}x{self.columns}"
        return f"product {sizes} of {self.matmul.a} and {self.matmul.b}, spread {self.spread}"


def products() -> Iterator[Product]:
    """Formats, widths and transposed operands, with boxes along the contraction and sizes that tiles do not divide."""
    sizes = (1, 1, 1, 0), (5, 16, 33, 0), (40, 100, 17, 0), (33, 600, 70, 0), (7, 300, 9, 3), (7, 300, 9, 6)
    which = (False, False), (False, True), (True, False)
    for (rows, depth, columns, spread), transposed in itertools.product(sizes, which):
        for kinds, bits in _OPERANDS:
            a, b = (
                Operand(kind(width), 0 if moved == first else 1, transposed=moved)
                for kind, width, moved, first in zip(kinds, bits, transposed, (True, False), strict=True)
            )
            yield Product(rows, depth, columns, MatMul(a, b), spread)


def product_disagreements(backend: Backend, product: Product, device: torch.device) -> list[str]:
    """The kernels whose result is further from the sum of the exact products of the quantised values than float32's
    rounding of the sums explains."""
    generator, matmul = torch.Generator().manual_seed(0), product.matmul
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    a_MK, b_KN = (torch.randn(shape, generator=generator) for shape in shapes)
    if product.spread:
        a_MK, b_KN = _spread_out(a_MK, product.spread, generator), _spread_out(b_KN.t(), product.spread, generator).t()
        a_MK[0, 0] = torch.nan
    operands = (matmul.a, a_MK), (matmul.b, b_KN)
    x, w = ((t.t() if operand.transposed else t).contiguous() for operand, t in operands)
    bias = torch.randn(product.columns, generator=generator)
    exact, bound = exact_and_bound(matmul, x, w, bias)
    wrong = []
    for gemm in (gemm for gemm in backend.gemms if gemm.fits(matmul, torch.float32)):
        left, right = prepared(gemm, matmul, x, w, REFERENCE)
        found = gemm.run(matmul, _moved(left, device), _moved(right, device), bias.to(device)).cpu().double()
        near = ((found - exact).abs() <= bound) | (found.isnan() & exact.isnan())
        if found.shape != exact.shape or not bool(near.all()):
            wrong.append(gemm.name)
    return wrong


def exact_and_bound(matmul: MatMul, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far from it sums in float32 may be."""
    operands = prepared(FLOAT64, matmul, a, b, REFERENCE)
    a_MK, b_KN = (values.double() for values in operands if isinstance(values, Tensor))
    offset = bias.double()
    bound = (a_MK.abs() @ b_KN.abs() + offset.abs()) * (a_MK.shape[1] + 2) * 2.0**-23
    return a_MK @ b_KN + offset, bound


def _spread_out(x_VK: Tensor, binades: int, generator: torch.Generator) -> Tensor:
    """``x``, every 16 values of a row made smaller by up to so many binades, or zero."""
    rows, depth = x_VK.shape
    down = torch.randint(0, binades + 1, (rows, -(-depth // 16)), generator=generator)
    down_VK = down.repeat_interleave(16, 1)[:, :depth]
    return torch.where(down_VK == binades, 0.0, x_VK * torch.exp2(-down_VK))


def _moved(x: Tensor | Codes, device: torch.device) -> Tensor | Codes:
    return Codes(x.codes.to(device), x.scales.to(device), x.shape) if isinstance(x, Codes) else x.to(device)


# ---- the passes of a linear layer, each in one call

#: of a layer's tensors: all the same, or as autocast has them
_LAYERS = (
    *(Dtypes(dtype, dtype, dtype) for dtype in DTYPES),
    *itertools.starmap(Dtypes, itertools.product(DTYPES[:2], DTYPES[:1], DTYPES[1:])),
)
#: of q0 to q3; units for 8 bits take the last two alone, and in the last the signed formats have the result too
_WIDTHS = ((4, 4, 4, 16), (8, 2, 5, 9), (4, 3, 3, 8), (2, 2, 4, 4))


def linear_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the passes of a linear layer in one call: yield what was tried, and what is wrong ("": nothing).

    The stash has to be the reference's; y, dx and dw the sums of exact products, up to float32's rounding of the sums
    and one rounding to their dtype.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (37, 600), (70, 600), (37, 70), (70,)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    kernels = itertools.takewhile(lambda gemm: gemm is not TORCH, backend.gemms if backend.linear else ())
    kinds: tuple[Callable[[int], Format], ...] = (BFP, SignedBFP, SignedNVInt)
    for kind, widths, dtypes, gemm in itertools.product(kinds, _WIDTHS, _LAYERS, tuple(kernels)):
        q0, q1, q2, q3 = (kind(2).at(bits) for bits in widths)
        matmuls = LinearMatMuls(
            MatMul(Operand(q0, -1), Operand(q0, -1, transposed=True)),
            MatMul(Operand(q2, -1), Operand(q1, 0), result=q3),
            MatMul(Operand(q3, 0, transposed=True), Operand(q1, 0)),
        )
        if not all(gemm.fits(matmul, dtypes.y) for matmul in matmuls):
            continue
        x, w, dy, bias = (t.to(dtype) for t, dtype in zip(given, (*dtypes, dtypes.w), strict=True))
        layer = Layer(matmuls, dtypes, x.shape, w.shape, False)
        y, stash, dx, dw = _passes(backend, device, layer, gemm.name, x, w, dy, bias)
        expected = REFERENCE.pack(x, q1, Layout.of(x.shape, 0), None)
        same = stash is not None and all(map(same_bits, expected, (stash.codes.cpu(), stash.scales.cpu())))
        wrong = [] if same else ["stash"]
        products = (("y", y, x, w, bias), ("dx", dx, dy, w, None), ("dw", dw, dy, x, None))
        for (name, found, left, right, offset), matmul, dtype in zip(
            products, matmuls, (dtypes.y, *dtypes[:2]), strict=True
        ):
            if found is None or found.dtype != dtype or not _is_product(found.cpu(), matmul, left, right, offset):
                wrong.append(name)
        yield f"layer of {dtypes} at {q0} {q1} {q2} {q3} by {gemm.name}", " ".join(wrong)


def _passes(
    backend: Backend, device: torch.device, layer: Layer, gemm: str, *tensors: Tensor
) -> tuple[Tensor, Codes | None, Tensor | None, Tensor | None]:
    """y, the stash, dx and dw of x, w, dy and a bias."""
    assert backend.linear is not None
    x, w, dy, bias = (t.to(device) for t in tensors)
    forward, backward = backend.linear.forward(layer, gemm), backend.linear.backward(layer, (gemm, gemm))
    assert forward is not None
    assert backward is not None
    y, stash = forward(x, w, bias, None, True)
    return y, stash, *backward(dy, w, stash, None)


def _is_product(found: Tensor, matmul: MatMul, a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether ``found`` is as near to the product in float64 as one rounding to its dtype, and to the grid of the
    result, allow after sums in float32."""
    exact, bound = exact_and_bound(matmul, a.float(), b.float(), torch.zeros(()) if bias is None else bias)
    limits = torch.finfo(found.dtype)
    bound += exact.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    if matmul.result is not None:  # a step of a row's largest value
        bound += exact.abs().amax(-1, keepdim=True) * 2.0 ** (2 - matmul.result.bits)
    return found.shape == exact.shape and bool(((found.double() - exact).abs() <= bound).all())
