"""Rows of the operations that move values: they keep an index, and give their result again from a code of the input.

A message of a graph network, x[source], is as long as the edges are many: the product that weighs it would keep it, and
x, which is far smaller, is kept already.
"""

from typing import Any

import torch
from torch import Tensor

from dsq.stash.codes import Stash


def index_select(stash: Stash, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """torch.index_select."""
    y = torch.index_select(input, dim, index)
    _from_index(stash, y, input, index, lambda x, index: torch.index_select(x, dim, index))
    return y


def getitem(stash: Stash, input: Tensor, index: Any) -> Tensor:
    """x[index] by one tensor of places; other indices are views, or rare."""
    y: Tensor = input[index]
    if isinstance(index, Tensor) and index.dtype == torch.int64:
        _from_index(stash, y, input, index, lambda x, index: x[index])
    return y


def _from_index(stash: Stash, y: Tensor, x: Tensor, index: Tensor, make: Any) -> None:
    if x.requires_grad and x.is_floating_point() and x.dim() >= 2:
        source = stash.find(x)
        if source is not None:
            stash.derive(y, (source, stash.exact(index)), make)
