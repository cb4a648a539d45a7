"""The passes of a linear layer, each in one call."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsq.formats import BFP, Format, Layout
from dsq.formats.signed_bfp import SignedBFP
from dsq.formats.signed_nvint import SignedNVInt
from dsq.kernels.backend import Backend, Codes, Dtypes, GemmKernel, LinearMatMuls, MatMul, Operand
from dsq.kernels.conformance.bits import DTYPES, same_bits
from dsq.kernels.conformance.gemm import exact_and_bound
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.reference.gemm import TORCH

#: of a layer's tensors: all the same, or as autocast has them
_LAYERS = (
    *(Dtypes(dtype, dtype, dtype) for dtype in DTYPES),
    *itertools.starmap(Dtypes, itertools.product(DTYPES[:2], DTYPES[:1], DTYPES[1:])),
)
#: of q0 to q3; units for 8 bits take the last two alone, and in the last the signed formats have the result too
_WIDTHS = ((4, 4, 4, 16), (8, 2, 5, 9), (4, 3, 3, 8), (2, 2, 4, 4))


def linear_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Of the passes of a linear layer in one call: what was tried, and what is wrong ("" for nothing). The stash has to
    be the reference's; y, dx and dw the sums of exact products, but for float32's rounding of the sums and one rounding
    to their dtype."""
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
        y, stash, dx, dw = _passes(backend, device, matmuls, gemm, dtypes, x, w, dy, bias)
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
    backend: Backend, device: torch.device, matmuls: LinearMatMuls, gemm: GemmKernel, dtypes: Dtypes, *tensors: Tensor
) -> tuple[Tensor, Codes | None, Tensor | None, Tensor | None]:
    """y, the stash, dx and dw of x, w, dy and a bias."""
    assert backend.linear is not None
    x, w, dy, bias = (t.to(device) for t in tensors)
    forward = backend.linear.forward(matmuls, gemm.name, dtypes, x.shape, w.shape, False)
    backward = backend.linear.backward(matmuls, (gemm.name, gemm.name), dtypes, dy.shape, w.shape, x.shape, False)
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
