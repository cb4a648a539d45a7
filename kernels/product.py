"""A product of two matrices that are quantised on the way; the three products of a linear layer, and their calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .grid import Grid


@dataclass(frozen=True, slots=True)
class Factor:
    """How a matrix enters a product."""

    grid: Grid | None  #: None: as it is
    dim: int  #: axis of its boxes
    transposed: bool = False  #: its transpose is multiplied
    seed: int = 0  #: added to the product's seed: random numbers of its own


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches: by identity, which is quick
class Product:
    """``a b``, each factor quantised first, and the result perhaps after."""

    a: Factor
    b: Factor
    result: Grid | None = None  #: boxes along the last axis
    result_seed: int = 0
    exact: bool = True  #: on the fastest units that hold the products of values exactly; else in their own dtype

    def contracted(self) -> tuple[int, int]:
        """The axes of ``a`` and of ``b``, before either is transposed, that the product sums over."""
        return (0 if self.a.transposed else 1), (1 if self.b.transposed else 0)


#: how a product is done: on codes, on bfloat16 units (one factor perhaps split in two), or in the factors' own type
Way = Literal["codes", "bfloat16", "split a", "split b", "float32"]


class Codes(NamedTuple):
    """A matrix that comes packed (kernels.pack)."""

    codes: Tensor
    exponents: Tensor
    shape: torch.Size


class Products(NamedTuple):
    """The three GEMMs of a linear layer (equations: dsq.functional)."""

    output: Product  #: of x and w
    input_gradient: Product  #: of dy and w
    weight_gradient: Product  #: of dy and the packed x

    @property
    def stash(self) -> Factor:
        """How x is kept for the backward."""
        return self.weight_gradient.b


#: (x (..., K), w (N, K), bias, seed, whether to pack x) -> y (..., N), in float32, and the packed x
ForwardCall = Callable[[Tensor, Tensor, Tensor | None, int | None, bool], tuple[Tensor, Codes | None]]
#: (dy (..., N), w or None, packed x or None, seed) -> dx (..., K) of w, dw (N, K) of x, or None
BackwardCall = Callable[[Tensor, Tensor | None, Codes | None, int | None], tuple[Tensor | None, Tensor | None]]


class LayerCalls(Protocol):
    """The passes of a linear layer, each in one call that is made for given shapes.

    They trust their caller: factors are float32, codes those of the Layout, the ways those that gemm.py has units for,
    and operands of other shapes are read all the same.
    """

    def forward(
        self, products: Products, way: Way, x_shape: torch.Size, w_shape: torch.Size, stochastic: bool
    ) -> ForwardCall:
        """``way`` is not split; of "float32", which torch multiplies in the end, the result has no grid."""
        ...

    def backward(
        self,
        products: Products,
        ways: tuple[Way, Way],
        dy_shape: torch.Size,
        w_shape: torch.Size | None,
        x_shape: torch.Size | None,
        stochastic: bool,
    ) -> BackwardCall:
        """``ways`` (of dx, of dw) are "codes" or "bfloat16". What is not used is None, as is its shape."""
        ...
