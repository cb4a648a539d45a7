"""Fake quantisation by other packages and by plain PyTorch: what the kernels are raced against."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

Quantizer = Callable[[Tensor], Tensor]


def plain_pytorch(x: Tensor, bits: int = 4, box: int = 16) -> Tensor:
    """Block floating point along the last axis in PyTorch's own operations, float32 throughout, tiny boxes left out."""
    boxes = x.unflatten(-1, (-1, box))
    exponent = torch.frexp(boxes.abs().amax(-1, keepdim=True)).exponent - 1
    step = torch.ldexp(torch.ones_like(exponent, dtype=x.dtype), exponent - (bits - 2))
    largest = 2 ** (bits - 1) - 1
    return ((boxes / step).round().clamp(-largest, largest) * step).flatten(-2)


def installed() -> Iterator[tuple[str, Quantizer]]:
    """Name and fake quantiser of every other package that is here, at 4 bits in blocks as near to 16 as it has."""
    if find_spec("qtorch"):
        yield "QPyTorch block_quantize", _qtorch()
    if find_spec("torchao"):
        yield "torchao to_mx fp4 block 32", _torchao()
    if find_spec("mx"):
        yield "microxcaling int4 block 16", _microxcaling()


def _qtorch() -> Quantizer:
    from qtorch.quant import block_quantize

    return lambda x: block_quantize(x.view(-1, 16), wl=4, dim=0, rounding="nearest").view(x.shape)


def _torchao() -> Quantizer:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    return lambda x: to_mx(x, torch.float4_e2m1fn_x2, 32)[1]


def _microxcaling() -> Quantizer:
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    specs = finalize_mx_specs({"w_elem_format": "int4", "a_elem_format": "int4", "block_size": 16, "scale_bits": 8})
    return lambda x: quantize_mx_op(x, specs, elem_format="int4", axes=[-1])
