"""The conformance test of backends. Codecs and masks must give the bits of the reference, and products the sums of
exact products, in any order.

    from dsq.kernels.conformance import failures
    assert not list(failures(backend, torch.device("cpu")))

Tests, analysis/gpu and backends from outside the package take their cases from here.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsq.formats import (
    BFP,
    E2M1_GRID,
    E4M3_GRID,
    NAMED,
    SCALE_RULES,
    FixedPoint,
    Format,
    Grid,
    GridFormat,
    Layout,
    SignedNVInt,
    integer_grid,
    parse_format,
)
from dsq.kernels.backend import (
    DTYPES,
    AffineCodes,
    Backend,
    Dtypes,
    GemmKernel,
    Groups,
    LinearMatMuls,
    LinearSpec,
    MatMul,
    MovingRanges,
    Operand,
    along_contraction,
)
from dsq.kernels.reference.backend import FLOAT64, REFERENCE, TORCH
from dsq.kernels.tuning import operands_for


def failures(backend: Backend, device: torch.device) -> Iterator[str]:
    """Yield a line for each case in which ``backend`` on ``device`` is wrong; none if the backend conforms."""
    trials = itertools.chain(
        ((str(case), disagreements(backend, case, device)) for case in cases(backend)),
        foreign_disagreements(backend, device),
        mask_disagreements(backend, device),
        affine_disagreements(backend, device),
        ((str(product), product_disagreements(backend, product, device)) for product in products()),
        linear_disagreements(backend, device),
    )
    yield from (f"{case}: {operations}" for case, operations in trials if operations)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors are equal in shape, dtype and every bit, except the payload of a NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(t.isnan(), 0, t).view(integers) for t in (a, b))
    return torch.equal(a, b)


def differing(**results: tuple[Tensor, Tensor]) -> str:
    """Return the names of the results of which the (expected, actual) tensors differ, as one text; "" if none does."""
    return " ".join(name for name, (expected, actual) in results.items() if not same_bits(expected, actual.cpu()))


# ---- quantize, pack and unpack: every width, axis, rounding and dtype, on edge cases of values


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
        if kind is GridFormat:
            yield from (case for case in _cases_of_grids(rows, columns) if backend.serves(case.format))
        elif kind is FixedPoint:
            yield from _cases_of_fixed_point(rows, columns)
        else:
            yield from (case for case in _cases_of_blocks(kind, rows, columns) if backend.serves(case.format))


def _cases_of_blocks(format: Callable[..., Format], rows: int, columns: int) -> Iterator[CodecCase]:
    ragged = (rows, columns)
    even = (2, 16 * (rows // 16), 128 * max(columns // 128, 1))
    for bits in range(2, 17):
        dtype_1 = DTYPES[bits % 3]
        dtype_2 = DTYPES[(bits // 3) % 3]
        for dim in (-1, -2):
            yield CodecCase(ragged, dim, format(bits, 16), dtype_1, dtype_2, seed=bits)
            yield CodecCase(even, dim, format(bits, 16), dtype_2, dtype_1)
    for bits in (2, 4, 8, 16):
        yield CodecCase(even, -1, format(bits, 16), seed=2**40 + bits)
        yield CodecCase((rows, 8 * columns), -1, format(bits, 8), torch.bfloat16, torch.bfloat16)
    # rows of whole words of 32 bits, whose last group has fewer than 32 codes
    for dim, full_groups in ((-1, columns // 32 * 32), (-2, 0)):
        for bits, last_group in ((3, 21), (5, 19), (6, 5), (7, 9)):
            yield CodecCase((rows, full_groups + last_group), dim, format(bits, 16))
    for block_size in (1, 2, 5, 8, 12, 32, 64, 100, 128, 200):
        yield CodecCase(ragged, -1, format(4, block_size), seed=-block_size)
        yield CodecCase(ragged, -2, format(3, block_size), torch.bfloat16)
    special_shapes = (((), -1), ((1,), 0), ((300,), 0), ((rows, 1), 0), ((1, columns), 0), ((0, 16), -1), ((16, 0), 0))
    for shape, dim in special_shapes:
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


#: formats that are data: those with a name, each scale rule, and blocks and grids that none of them has
GRID_FORMATS = tuple(
    dict.fromkeys(
        (
            *(fmt for fmt in NAMED.values() if isinstance(fmt, GridFormat)),
            *(parse_format(f"{name}:{rule}") for name in ("mxfp4", "mxfp8_e5m2") for rule in SCALE_RULES["e8m0"]),
            GridFormat(E2M1_GRID, (1, 0), "e4m3"),
            GridFormat(E2M1_GRID, (0, 0), "e4m3", "clamped"),
            GridFormat(E4M3_GRID, (0, 4), "fp32"),
            GridFormat(Grid(2, -1, 14.0), (1, 8)),
            GridFormat(Grid(1, -100, 2.0**90), (1, 16)),
            GridFormat(integer_grid(3), (3, 48), "fp32"),
            GridFormat(integer_grid(16), (1, 24), prescale=0.75),
        )
    )
)


def _cases_of_grids(rows: int, columns: int) -> Iterator[CodecCase]:
    for i, fmt in enumerate(GRID_FORMATS):
        dtype, out = DTYPES[i % 3], DTYPES[i // 3 % 3]
        for dim in (-1, -2):
            yield CodecCase((rows, columns), dim, fmt, dtype, out, seed=i)
            yield CodecCase((2 * rows, 128 * max(columns // 128, 1)), dim, fmt, out=dtype)
        for dim in range(3):
            yield CodecCase((2, rows, columns - 7), dim, fmt, seed=None if dim else -i)
        for shape in ((), (1,), (300,), (rows, 1), (0, 16), (16, 0)):
            yield CodecCase(shape, -1 if len(shape) < 2 else 0, fmt)


def edges(case: CodecCase) -> Tensor:
    """Return a tensor of patches of ordinary values over many binades, ties, subnormals, zeros of both signs, the
    largest values, and NaN and infinities. One patch in eight has the latter, so that most blocks are finite.

    Of a format that scales the tensor, fewer binades, and for blocks along the last axis no NaN nor infinity.
    """
    generator = torch.Generator().manual_seed(case.format.bits)
    layout = Layout.of(case.shape, -1)
    uniform = torch.rand(layout.rows, layout.columns, generator=generator, dtype=torch.float64)
    limits = torch.finfo(case.dtype)
    fmt = case.format  # one NaN makes the whole tensor NaN if it has a scale
    of_tensor = fmt.block_size == 0 or fmt.tensor_bytes > 0 or (isinstance(fmt, GridFormat) and fmt.scale == "e4m3")
    ends = [2.0**-9, 2.0**9] if of_tensor else [limits.tiny * 0.9, limits.max]
    lowest, highest = torch.tensor(ends).double().log2().floor().tolist()

    row, column = (torch.arange(n).div(p, rounding_mode="floor") for n, p in zip(uniform.shape, (5, 48), strict=True))
    patch = (row[:, None] * 3 + column[None, :] * 5) % 8
    binade = lowest + (row[:, None] * 37 + column[None, :] * 61) % int(highest - lowest)
    centred = 2 * uniform - 1
    ordinary = centred * torch.exp2(binade)
    ties = (centred * 2**case.format.bits).round() * torch.exp2(binade.clamp(max=highest - 16))
    subnormal = (centred * 300).round() * limits.smallest_normal * limits.eps
    zero = torch.copysign(torch.zeros_like(centred), centred)
    largest = torch.where(uniform < 0.5, ends[1], -ends[1])
    non_finite = torch.where(uniform < 0.05, torch.nan, torch.where(uniform > 0.95, torch.inf, centred))
    x = torch.stack([ordinary, ties, subnormal, zero, largest, non_finite, ordinary, ties]).gather(0, patch[None])[0]
    if of_tensor and case.dim == -1:
        x = torch.where(x.isfinite(), x, 0.0)
    return x.reshape(case.shape).to(case.dtype)


def disagreements(backend: Backend, case: CodecCase, device: torch.device, x: Tensor | None = None) -> str:
    """Return the operations in which ``backend`` on ``device`` differs from the reference on the CPU; "" if every bit
    agrees. ``x`` is a tensor of the case's shape and dtype; None: ``edges``."""
    x = edges(case) if x is None else x
    fmt, layout = case.format, Layout.of(case.shape, case.dim)
    codes, scales = REFERENCE.pack(x, fmt, layout, case.seed)
    backend_codes, backend_scales = backend.pack(x.to(device), fmt, layout, case.seed)
    quantized = REFERENCE.quantize(x, fmt, layout, case.seed, case.out)
    unpacked = REFERENCE.unpack(codes, scales, fmt, layout, case.out)
    return differing(
        codes=(codes, backend_codes),
        scales=(scales, backend_scales),
        quantize=(quantized, backend.quantize(x.to(device), fmt, layout, case.seed, case.out)),
        unpack=(unpacked, backend.unpack(codes.to(device), scales.to(device), fmt, layout, case.out)),
    )


#: ranges of bytes, lowest and one more than highest. The range of all bytes comes three times, as a tensor has one
#: exponent; the others have one byte each
_BYTE_RANGES = ((0, 256),) * 3 + ((0, 1), (127, 128), (128, 129), (255, 256))


def foreign_disagreements(
    backend: Backend, device: torch.device, widths: Sequence[int] = range(2, 17)
) -> Iterator[tuple[str, str]]:
    """Unpack codes and scales that no kernel packed, as from hooks and damaged files. Yield the name of each case, and
    "unpack" if ``backend`` gives other values than the reference, else ""."""
    generator = torch.Generator().manual_seed(0)
    for kind in sorted(backend.formats, key=lambda kind: kind.name):
        formats = GRID_FORMATS if kind is GridFormat else [kind(bits) for bits in widths]
        for fmt, dim, (low, high) in itertools.product(filter(backend.serves, formats), (0, 1), _BYTE_RANGES):
            layout = Layout.of((19, 70), dim)
            shapes = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
            codes, scales = (torch.randint(low, high, s, generator=generator, dtype=torch.uint8) for s in shapes)
            expected = REFERENCE.unpack(codes, scales, fmt, layout, torch.float32)
            actual = backend.unpack(codes.to(device), scales.to(device), fmt, layout, torch.float32)
            yield f"foreign bytes from {low} to {high - 1} of {fmt} dim {dim}", differing(unpack=(expected, actual))


# ---- masks and affine codes


def mask_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the masks. Yield the name of each case, and the operations in which ``backend`` differs."""
    all_limits = (0.0, math.nan, True), (-0.1, 0.1, False), (-math.inf, 0.0, True)
    for dtype, count, limits in itertools.product((*DTYPES, torch.bool), (0, 1, 8, 31, 2048, 4100), all_limits):
        x = edges(CodecCase((count,), -1, BFP(4, 16), torch.float32 if dtype is torch.bool else dtype)).to(dtype)
        bits = REFERENCE.pack_mask(x, *limits)
        pairs = {"pack": (bits, backend.pack_mask(x.to(device), *limits))}
        if dtype is not torch.bool:
            on_device, y = bits.to(device), REFERENCE.unpack_mask(bits, count, dtype)
            pairs["unpack"] = y, backend.unpack_mask(on_device, count, dtype)
            pairs["apply"] = REFERENCE.apply_mask(bits, x), backend.apply_mask(on_device, x.to(device))
            pairs["scale"] = REFERENCE.scale_mask(bits, x, 1.25), backend.scale_mask(on_device, x.to(device), 1.25)
        yield f"mask of {count} {dtype} between {limits[0]} and {limits[1]}", differing(**pairs)


#: (number of values, groups) of affine codes: runs that tiles divide and others, several groups per tile, a short last
#: run
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
    """Try affine codes. Yield the name of each case, and the operations in which ``backend`` differs."""
    for (count, groups), bits, dtype in itertools.product(_AFFINE, range(1, 9), DTYPES):
        x = edges(CodecCase((count,), -1, BFP(4, 16), dtype))
        seed = None if bits % 3 == 0 else 2**33 + bits
        state = torch.linspace(0.01, 3, 2 * groups.number).view(2, -1)
        state[:, ::3] = torch.nan  # groups that have seen no tensor
        one_run_a_group = bits % 2 == 0 and groups.run * groups.number >= count
        running = None if one_run_a_group else MovingRanges(state.clone(), 0.9)  # values lie outside these ranges
        packed = REFERENCE.affine_pack(x, bits, groups, running, seed)
        y = REFERENCE.affine_unpack(packed, bits, groups, count, dtype)

        backend_running = None if running is None else MovingRanges(state.to(device), 0.9)
        backend_packed = backend.affine_pack(x.to(device), bits, groups, backend_running, seed)
        packed_on_device = AffineCodes(*(part.to(device) for part in packed))
        backend_y = backend.affine_unpack(packed_on_device, bits, groups, count, dtype)
        pairs = {
            "codes": (packed.codes, backend_packed.codes),
            "ranges": (packed.ranges, backend_packed.ranges),
            "unpack": (y, backend_y),
        }
        if running is not None and backend_running is not None:
            pairs["running"] = running.alpha_beta, backend_running.alpha_beta
        # + 0: if a group's smallest value is zero, its sign is not specified
        operations = differing(**{name: (expected + 0, actual + 0) for name, (expected, actual) in pairs.items()})
        yield f"affine codes of {count} {dtype} in {groups}, {bits} bits, seed {seed}", operations


# ---- products of two matrices: exact but for float32's rounding of their sums


def _at(
    families: Sequence[tuple[Callable[..., Format], Callable[..., Format]]], widths: Sequence[tuple[int, int]]
) -> Iterator[tuple[Format, Format]]:
    for (a, b), (a_bits, b_bits) in itertools.product(families, widths):
        yield a(a_bits), b(b_bits)


_SIGNED_SCALES = ((SignedNVInt, SignedNVInt), (BFP, SignedNVInt), (SignedNVInt, BFP))
_GRIDS = (
    *(("mxfp4", "mxfp4"), ("mxfp6_e2m3", "mxint8"), ("mx6", "mx4"), ("mxfp8_e4m3", "mxfp4"), ("mxfp4_aws", "mxfp4")),
    *(("nvfp4", "nvfp4_2d"), ("nvfp4_2d", "nvfp4_clamped"), ("int8_row", "int8_tensor"), ("int8_tensor", "int8_row")),
    *(("fp8_tensor", "fp8_row"), ("fp8_e5m2_row", "fp8_tensor")),
)
#: formats of the two operands of products
_OPERANDS: tuple[tuple[Format, Format], ...] = (
    *_at(((BFP, BFP), (FixedPoint, FixedPoint)), ((2, 2), (4, 4), (8, 5), (9, 9), (16, 4), (3, 16))),
    *_at(_SIGNED_SCALES, ((2, 3), (4, 4), (8, 8), (16, 4))),
    *((NAMED[a], NAMED[b]) for a, b in _GRIDS),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One product of quantized operands: a (rows, depth) by b (depth, columns)."""

    rows: int
    depth: int
    columns: int
    matmul: MatMul
    spread: int = 0  #: binades over which neighboring blocks lie. If above 0, some blocks are zeros and a value is NaN

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.depth}x{self.columns}"
        return f"product {sizes} of {self.matmul.a} and {self.matmul.b}, spread {self.spread}"


def products() -> Iterator[Product]:
    """Yield products of all formats, widths and transposed operands, with blocks along the contraction and sizes that
    tiles do not divide."""
    sizes = (1, 1, 1, 0), (5, 16, 33, 0), (40, 100, 17, 0), (33, 600, 70, 0), (7, 300, 9, 3), (7, 300, 9, 6)
    transpositions = (False, False), (False, True), (True, False)
    for (rows, depth, columns, spread), transposed in itertools.product(sizes, transpositions):
        for a, b in _OPERANDS:
            yield Product(rows, depth, columns, along_contraction(a, b, transposed), spread)


def product_disagreements(backend: Backend, product: Product, device: torch.device) -> str:
    """Return the names of the kernels that get the product wrong (``multiplies``)."""
    fitting = (gemm for gemm in backend.gemms if gemm.fits(product.matmul, torch.float32))
    return " ".join(gemm.name for gemm in fitting if not multiplies(gemm, product, device))


def multiplies(gemm: GemmKernel, product: Product, device: torch.device) -> bool:
    """Return whether the result of ``gemm`` differs from the sum of the exact products of the quantized values by at
    most float32's rounding of the sums."""
    generator = torch.Generator().manual_seed(0)
    matmul = product.matmul
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    randn = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are
    a_MK, b_KN = (randn(shape) for shape in shapes)
    if product.spread:
        a_MK, b_KN = _spread_out(a_MK, product.spread, generator), _spread_out(b_KN.t(), product.spread, generator).t()
        a_MK[0, 0] = torch.nan
    x, w = ((t.t() if op.transposed else t).contiguous() for op, t in ((matmul.a, a_MK), (matmul.b, b_KN)))
    bias = randn(product.columns)
    y = gemm.run(matmul, *operands_for(gemm, matmul, x.to(device), w.to(device), REFERENCE), bias.to(device))
    return _is_product(y, matmul, x, w, bias)


def _is_product(y: Tensor, matmul: MatMul, a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Return whether ``y`` is the product in float64, up to the rounding of sums in float32, one rounding to the dtype
    of ``y`` and one to the grid of the result."""
    operands = operands_for(FLOAT64, matmul, a.float(), b.float(), REFERENCE)
    a_MK, b_KN = (values.double() for values in operands if isinstance(values, Tensor))
    offset = torch.zeros(()) if bias is None else bias.double()
    y = y.cpu()
    y_float64 = a_MK @ b_KN + offset
    bound = (a_MK.abs() @ b_KN.abs() + offset.abs()) * (a_MK.shape[1] + 2) * 2.0**-23
    if y.dtype is not torch.float32:
        limits = torch.finfo(y.dtype)
        bound += y_float64.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    if matmul.result is not None:  # a step of a row's largest value
        bound += y_float64.abs().amax(-1, keepdim=True) * 2.0 ** (2 - matmul.result.bits)
    within_bound = ((y.double() - y_float64).abs() <= bound) | (y.isnan() & y_float64.isnan())
    return y.shape == y_float64.shape and bool(within_bound.all())


def _spread_out(x_VK: Tensor, binades: int, generator: torch.Generator) -> Tensor:
    """Return ``x`` with every 16 values of a row divided by up to so many binades, or set to zero."""
    rows, depth = x_VK.shape
    shift = torch.randint(0, binades + 1, (rows, -(-depth // 16)), generator=generator)
    shift_VK = shift.repeat_interleave(16, 1)[:, :depth]
    return torch.where(shift_VK == binades, 0.0, x_VK * torch.exp2(-shift_VK))


# ---- the passes of a linear layer, each in one call

#: dtypes of a layer's tensors: all the same, or as under autocast
_LAYERS = (
    *(Dtypes(dtype, dtype, dtype) for dtype in DTYPES),
    *itertools.starmap(Dtypes, itertools.product(DTYPES[:2], DTYPES[:1], DTYPES[1:])),
)
#: widths of q0 to q3. Units for 8 bits take the last two alone; in the last one, snvint quantizes the result too
_WIDTHS = ((4, 4, 4, 16), (8, 2, 5, 9), (4, 3, 3, 8), (2, 2, 4, 4))


def linear_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Try the passes of a linear layer in one call. Yield the name of each case, and the names of wrong tensors.

    The stash must be the reference's. y, dx and dw must be the sums of exact products, up to float32's rounding of the
    sums and one rounding to their dtype.
    """
    linear = backend.linear
    generator = torch.Generator().manual_seed(0)
    if linear is None:
        return
    tensors = [torch.randn(shape, generator=generator) for shape in ((37, 600), (70, 600), (37, 70), (70,))]
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
        x, w, dy, bias = (t.to(dtype) for t, dtype in zip(tensors, (*dtypes, dtypes.w), strict=True))
        spec = LinearSpec(matmuls, dtypes, x.shape, w.shape, False)
        forward, backward = linear.forward(spec, gemm.name), linear.backward(spec, (gemm.name, gemm.name))
        assert forward is not None
        assert backward is not None
        y, stash = forward(x.to(device), w.to(device), bias.to(device), None, True)
        dx, dw = backward(dy.to(device), w.to(device), stash, None)
        expected = REFERENCE.pack(x, q1, Layout.of(x.shape, 0), None)
        same_stash = stash is not None and all(map(same_bits, expected, (stash.codes.cpu(), stash.scales.cpu())))
        wrong_tensors = [] if same_stash else ["stash"]
        for name, result, dtype, matmul, *operands in (
            ("y", y, dtypes.y, matmuls.output, x, w, bias),
            ("dx", dx, dtypes.x, matmuls.input_gradient, dy, w, None),
            ("dw", dw, dtypes.w, matmuls.weight_gradient, dy, x, None),
        ):
            if result is None or result.dtype != dtype or not _is_product(result, matmul, *operands):
                wrong_tensors.append(name)
        yield f"layer of {dtypes} at {q0} {q1} {q2} {q3} by {gemm.name}", " ".join(wrong_tensors)
