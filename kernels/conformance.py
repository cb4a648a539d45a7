"""Every backend must pass this: the reference's bits for codecs and masks, products exact to the order of their sums.

    from dsq.kernels.conformance import failures
    assert not list(failures(backend, torch.device("cpu")))

Tests, analysis/gpu and backends from outside the package all take their cases from here.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout, SignedNVInt, options
from dsq.kernels.backend import (
    DTYPES,
    AffineCodes,
    Backend,
    Dtypes,
    Groups,
    Layer,
    LinearMatMuls,
    MatMul,
    MovingRanges,
    Operand,
    along_contraction,
)
from dsq.kernels.reference.backend import FLOAT64, REFERENCE, TORCH
from dsq.kernels.tuning import prepared


def failures(backend: Backend, device: torch.device) -> Iterator[str]:
    """Everything in which ``backend`` on ``device`` is not what a backend must be; nothing where it conforms."""
    trials = itertools.chain(
        ((str(case), disagreements(backend, case, device)) for case in cases(backend)),
        foreign_disagreements(backend, device),
        mask_disagreements(backend, device),
        affine_disagreements(backend, device),
        ((str(product), product_disagreements(backend, product, device)) for product in products()),
        linear_disagreements(backend, device),
    )
    yield from (f"{what}: {wrong}" for what, wrong in trials if wrong)


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


def differing(**results: tuple[Tensor, Tensor]) -> str:
    """The names of the results in which (expected, what the backend gave) differ, in one text: "" if none does."""
    return " ".join(name for name, (expected, found) in results.items() if not same_bits(expected, found.cpu()))


# ---- quantize, pack and unpack: every width, axis, rounding and dtype, on values full of edges


@dataclass(frozen=True, slots=True)
class CodecCase:
    """One tensor, one format, one rounding."""

    shape: tuple[int, ...]
    dim: int
    format: Format
    dtype: torch.dtype = torch.float32  #: of the tensor
    out: torch.dtype = torch.float32  #: of the quantized and the unpacked values
    seed: int | None = None  #: None rounds to nearest

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        types = "->".join(str(t).removeprefix("torch.") for t in (self.dtype, self.out))
        return f"{shape} dim {self.dim} {self.format} {types} seed {self.seed}"


def cases(backend: Backend, rows: int = 21, columns: int = 140) -> Iterator[CodecCase]:
    """Yield the widths, axes, roundings and types of each format that the backend serves, and shapes that tiles, blocks
    and bytes do not divide."""
    for kind in sorted(backend.formats, key=lambda kind: kind.name):
        if "block_size" in options(kind.name):
            yield from (case for case in _cases_of_blocks(kind, rows, columns) if backend.serves(case.format))
        elif kind is FixedPoint:
            yield from _cases_of_fixed_point(rows, columns)


def _cases_of_blocks(format: Callable[..., Format], rows: int, columns: int) -> Iterator[CodecCase]:
    ragged, even = (rows, columns), (2, 16 * (rows // 16), 128 * max(columns // 128, 1))
    for bits in range(2, 17):
        into, out = DTYPES[bits % 3], DTYPES[(bits // 3) % 3]
        for dim in (-1, -2):
            yield CodecCase(ragged, dim, format(bits, 16), into, out, seed=bits)
            yield CodecCase(even, dim, format(bits, 16), out, into)
    for bits in (2, 4, 8, 16):
        yield CodecCase(even, -1, format(bits, 16), seed=2**40 + bits)
        yield CodecCase((rows, 8 * columns), -1, format(bits, 8), torch.bfloat16, torch.bfloat16)
    for dim, before in ((-1, columns // 32 * 32), (-2, 0)):  # rows of whole words of 32 bits that end within 32 codes
        for bits, last in ((3, 21), (5, 19), (6, 5), (7, 9)):
            yield CodecCase((rows, before + last), dim, format(bits, 16))
    for block_size in (1, 2, 5, 8, 12, 32, 64, 100, 128, 200):
        yield CodecCase(ragged, -1, format(4, block_size), seed=-block_size)
        yield CodecCase(ragged, -2, format(3, block_size), torch.bfloat16)
    odd = (((), -1), ((1,), 0), ((300,), 0), ((rows, 1), 0), ((1, columns), 0), ((0, 16), -1), ((16, 0), 0))
    for shape, dim in odd:
        yield CodecCase(shape, dim, format(4, 16))
    for dim in range(3):
        yield CodecCase((2, *ragged), dim, format(4, 16), seed=dim)
    yield CodecCase((4, rows, 2, 40), 1, format(4, 16))


def _cases_of_fixed_point(rows: int, columns: int) -> Iterator[CodecCase]:
    for exponent in (None, 3, -127, 127):
        four, eight, sixteen = (
            FixedPoint(bits, None if exponent is None else bits - 2 - exponent) for bits in (4, 8, 16)
        )
        yield CodecCase((rows, columns), -1, eight)
        yield CodecCase((3, rows, columns), 0, sixteen, torch.float16, torch.bfloat16, seed=1)
        yield CodecCase((rows, 128), -1, four, torch.bfloat16, torch.float16, seed=2)
    for shape in ((), (1,), (300,), (rows, 1), (1, columns), (0, 16), (16, 0)):
        yield CodecCase(shape, -1, FixedPoint(5), seed=3)
    yield CodecCase((rows, 40), 1, FixedPoint(4))


def edges(case: CodecCase) -> Tensor:
    """A tensor whose patches hold ordinary values over many binades, ties, subnormals, zeros of both signs, the largest
    values, and NaN and infinities (one patch in eight, so that most blocks are finite)."""
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
    if case.format.block_size == 0:  # one NaN would hide every other value
        x = torch.where(x.isfinite(), x, 0.0)
    return x.reshape(case.shape).to(case.dtype)


def disagreements(backend: Backend, case: CodecCase, device: torch.device, x: Tensor | None = None) -> str:
    """The operations in which ``backend`` on ``device`` differs from the reference on the CPU: "" where every bit
    agrees. ``x``: a tensor of the case's shape and dtype; None: ``edges``."""
    x, how = edges(case) if x is None else x, (case.format, Layout.of(case.shape, case.dim))
    codes, scales = REFERENCE.pack(x, *how, case.seed)
    found_codes, found_scales = backend.pack(x.to(device), *how, case.seed)
    rounded = REFERENCE.quantize(x, *how, case.seed, case.out)
    unpacked = REFERENCE.unpack(codes, scales, *how, case.out)
    return differing(
        codes=(codes, found_codes),
        scales=(scales, found_scales),
        quantize=(rounded, backend.quantize(x.to(device), *how, case.seed, case.out)),
        unpack=(unpacked, backend.unpack(codes.to(device), scales.to(device), *how, case.out)),
    )


#: the lowest and one more than the highest: any bytes, three times, as a tensor has one exponent; or one byte alone
_BYTES = ((0, 256),) * 3 + ((0, 1), (127, 128), (128, 129), (255, 256))


def foreign_disagreements(
    backend: Backend, device: torch.device, widths: Sequence[int] = range(2, 17)
) -> Iterator[tuple[str, str]]:
    """Unpack codes and scales that no kernel packed, as hooks and damaged files give them: yield what was tried, and
    "unpack" if ``backend`` makes other values of them than the reference."""
    generator = torch.Generator().manual_seed(0)
    for kind in sorted(backend.formats, key=lambda kind: kind.name):
        for bits, dim, (low, high) in itertools.product(widths, (0, 1), _BYTES):
            layout, fmt = Layout.of((19, 70), dim), kind(bits)
            shapes = layout.code_shape(bits), fmt.scale_shape(layout)
            codes, scales = (torch.randint(low, high, s, generator=generator, dtype=torch.uint8) for s in shapes)
            expected = REFERENCE.unpack(codes, scales, fmt, layout, torch.float32)
            found = backend.unpack(codes.to(device), scales.to(device), fmt, layout, torch.float32)
            yield f"foreign bytes from {low} to {high - 1} of {fmt} dim {dim}", differing(unpack=(expected, found))


# ---- masks and affine codes


def mask_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the masks: yield what was tried, and where ``backend`` differs from the reference ("": nowhere)."""
    limits = (0.0, math.nan, True), (-0.1, 0.1, False), (-math.inf, 0.0, True)
    for dtype, count, given in itertools.product((*DTYPES, torch.bool), (0, 1, 8, 31, 2048, 4100), limits):
        x = edges(CodecCase((count,), -1, BFP(4, 16), torch.float32 if dtype is torch.bool else dtype)).to(dtype)
        bits = REFERENCE.pack_mask(x, *given)
        pairs = {"pack": (bits, backend.pack_mask(x.to(device), *given))}
        if dtype is not torch.bool:
            on_device, y = bits.to(device), REFERENCE.unpack_mask(bits, count, dtype)
            pairs["unpack"] = y, backend.unpack_mask(on_device, count, dtype)
            pairs["apply"] = REFERENCE.apply_mask(bits, x), backend.apply_mask(on_device, x.to(device))
        yield f"mask of {count} {dtype} between {given[0]} and {given[1]}", differing(**pairs)


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
        x, seed = edges(CodecCase((count,), -1, BFP(4, 16), dtype)), None if bits % 3 == 0 else 2**33 + bits
        before = torch.linspace(0.01, 3, 2 * groups.number).view(2, -1)
        before[:, ::3] = torch.nan  # groups that no tensor was seen of
        own = bits % 2 == 0 and groups.run * groups.number >= count  # else in running ranges: values lie outside
        running = None if own else MovingRanges(before.clone(), 0.9)
        packed = REFERENCE.affine_pack(x, bits, groups, running, seed)
        y = REFERENCE.affine_unpack(packed, bits, groups, count, dtype)

        moving = None if running is None else MovingRanges(before.to(device), 0.9)
        found = backend.affine_pack(x.to(device), bits, groups, moving, seed)
        moved = AffineCodes(*(part.to(device) for part in packed))
        found_y = backend.affine_unpack(moved, bits, groups, count, dtype)
        pairs = {
            "codes": (packed.codes, found.codes),
            "ranges": (packed.ranges, found.ranges),
            "unpack": (y, found_y),
        }
        if running is not None and moving is not None:
            pairs["running"] = running.alpha_beta, moving.alpha_beta
        # + 0: which of its zeros is a group's smallest value is not said
        wrong = differing(**{name: (expected + 0, got + 0) for name, (expected, got) in pairs.items()})
        yield f"affine codes of {count} {dtype} in {groups}, {bits} bits, seed {seed}", wrong


# ---- products of two matrices: exact but for float32's rounding of their sums

_SIGNED = ((SignedNVInt, SignedNVInt), (BFP, SignedNVInt), (SignedNVInt, BFP))
#: formats of the two operands of products, and their widths
_OPERANDS: tuple[tuple[tuple[Callable[..., Format], ...], tuple[int, int]], ...] = (
    *itertools.product(((BFP, BFP), (FixedPoint, FixedPoint)), ((2, 2), (4, 4), (8, 5), (9, 9), (16, 4), (3, 16))),
    *itertools.product(_SIGNED, ((2, 3), (4, 4), (8, 8), (16, 4))),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One product of quantized operands: a (rows, depth) by b (depth, columns)."""

    rows: int
    depth: int
    columns: int
    matmul: MatMul
    spread: int = 0  #: binades over which neighboring blocks lie; some blocks are zeros then, and a value is NaN

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.depth}x{self.columns}"
        return f"product {sizes} of {self.matmul.a} and {self.matmul.b}, spread {self.spread}"


def products() -> Iterator[Product]:
    """Formats, widths and transposed operands, with blocks along the contraction and sizes that tiles do not divide."""
    sizes = (1, 1, 1, 0), (5, 16, 33, 0), (40, 100, 17, 0), (33, 600, 70, 0), (7, 300, 9, 3), (7, 300, 9, 6)
    which = (False, False), (False, True), (True, False)
    for (rows, depth, columns, spread), transposed in itertools.product(sizes, which):
        for kinds, bits in _OPERANDS:
            a, b = (kind(width) for kind, width in zip(kinds, bits, strict=True))
            yield Product(rows, depth, columns, along_contraction(a, b, transposed), spread)


def product_disagreements(backend: Backend, product: Product, device: torch.device) -> str:
    """The kernels whose result is further from the sum of the exact products of the quantized values than float32's
    rounding of the sums explains."""
    generator, matmul = torch.Generator().manual_seed(0), product.matmul
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    a_MK, b_KN = (torch.randn(shape, generator=generator) for shape in shapes)
    if product.spread:
        a_MK, b_KN = _spread_out(a_MK, product.spread, generator), _spread_out(b_KN.t(), product.spread, generator).t()
        a_MK[0, 0] = torch.nan
    x, w = ((t.t() if op.transposed else t).contiguous() for op, t in ((matmul.a, a_MK), (matmul.b, b_KN)))
    bias = torch.randn(product.columns, generator=generator)
    wrong = []
    for gemm in (gemm for gemm in backend.gemms if gemm.fits(matmul, torch.float32)):
        found = gemm.run(matmul, *prepared(gemm, matmul, x.to(device), w.to(device), REFERENCE), bias.to(device))
        if not _is_product(found, matmul, x, w, bias):
            wrong.append(gemm.name)
    return " ".join(wrong)


def _is_product(found: Tensor, matmul: MatMul, a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether ``found`` is as near to the product in float64 as sums in float32 allow, one rounding to its dtype and
    one to the grid of the result."""
    operands = prepared(FLOAT64, matmul, a.float(), b.float(), REFERENCE)
    a_MK, b_KN = (values.double() for values in operands if isinstance(values, Tensor))
    offset, found = torch.zeros(()) if bias is None else bias.double(), found.cpu()
    exact = a_MK @ b_KN + offset
    bound = (a_MK.abs() @ b_KN.abs() + offset.abs()) * (a_MK.shape[1] + 2) * 2.0**-23
    if found.dtype is not torch.float32:
        limits = torch.finfo(found.dtype)
        bound += exact.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    if matmul.result is not None:  # a step of a row's largest value
        bound += exact.abs().amax(-1, keepdim=True) * 2.0 ** (2 - matmul.result.bits)
    near = ((found.double() - exact).abs() <= bound) | (found.isnan() & exact.isnan())
    return found.shape == exact.shape and bool(near.all())


def _spread_out(x_VK: Tensor, binades: int, generator: torch.Generator) -> Tensor:
    """``x``, every 16 values of a row made smaller by up to so many binades, or zero."""
    rows, depth = x_VK.shape
    down = torch.randint(0, binades + 1, (rows, -(-depth // 16)), generator=generator)
    down_VK = down.repeat_interleave(16, 1)[:, :depth]
    return torch.where(down_VK == binades, 0.0, x_VK * torch.exp2(-down_VK))


# ---- the passes of a linear layer, each in one call

#: of a layer's tensors: all the same, or as autocast has them
_LAYERS = (
    *(Dtypes(dtype, dtype, dtype) for dtype in DTYPES),
    *itertools.starmap(Dtypes, itertools.product(DTYPES[:2], DTYPES[:1], DTYPES[1:])),
)
#: of q0 to q3; units for 8 bits take the last two alone, and in the last snvint has the result too
_WIDTHS = ((4, 4, 4, 16), (8, 2, 5, 9), (4, 3, 3, 8), (2, 2, 4, 4))


def linear_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the passes of a linear layer in one call: yield what was tried, and what is wrong ("": nothing).

    The stash has to be the reference's; y, dx and dw the sums of exact products, up to float32's rounding of the sums
    and one rounding to their dtype.
    """
    linear, generator = backend.linear, torch.Generator().manual_seed(0)
    if linear is None:
        return
    given = [torch.randn(shape, generator=generator) for shape in ((37, 600), (70, 600), (37, 70), (70,))]
    gemms = itertools.takewhile(lambda gemm: gemm is not TORCH, backend.gemms)
    kinds: tuple[Callable[[int], Format], ...] = (BFP, SignedNVInt)
    for kind, widths, dtypes, gemm in itertools.product(kinds, _WIDTHS, _LAYERS, tuple(gemms)):
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
        forward, backward = linear.forward(layer, gemm.name), linear.backward(layer, (gemm.name, gemm.name))
        assert forward is not None
        assert backward is not None
        y, stash = forward(x.to(device), w.to(device), bias.to(device), None, True)
        dx, dw = backward(dy.to(device), w.to(device), stash, None)
        expected = REFERENCE.pack(x, q1, Layout.of(x.shape, 0), None)
        same = stash is not None and all(map(same_bits, expected, (stash.codes.cpu(), stash.scales.cpu())))
        wrong = [] if same else ["stash"]
        for name, found, dtype, matmul, *operands in (
            ("y", y, dtypes.y, matmuls.output, x, w, bias),
            ("dx", dx, dtypes.x, matmuls.input_gradient, dy, w, None),
            ("dw", dw, dtypes.w, matmuls.weight_gradient, dy, x, None),
        ):
            if found is None or found.dtype != dtype or not _is_product(found, matmul, *operands):
                wrong.append(name)
        yield f"layer of {dtypes} at {q0} {q1} {q2} {q3} by {gemm.name}", " ".join(wrong)
