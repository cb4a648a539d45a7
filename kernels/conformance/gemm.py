"""Products of two matrices: exact but for float32's rounding of their sums."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format
from dsq.formats.signed_bfp import SignedBFP
from dsq.formats.signed_nvint import SignedNVInt
from dsq.kernels.backend import Backend, Codes, MatMul, Operand
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.reference.gemm import FLOAT64
from dsq.kernels.tuning import prepared

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
