"""A product of two matrices that are quantised on the way, and the three of a linear layer."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
