"""Float32 tensors of the table's operations kept in bfloat16: half the bytes, 8 bits of significand."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsq.arguments import whole_number
from dsq.kept import What
from dsq.stash.codes import Code
from dsq.stash.controller import Controller
from dsq.stash.interception import TablePolicy
from dsq.stash.memory import MemoryOrder
from dsq.stash.policy import register


@register("bfloat16", composes_with=("checkpoint",))
def attach(model: nn.Module, *, smallest: int = 256) -> Controller:
    """Keep float32 tensors of at least ``smallest`` values in bfloat16. Raises ValueError for ``smallest`` under 0."""
    controller = Bfloat16(model)
    controller.smallest = whole_number("smallest", smallest, 0)
    return controller


class Bfloat16(TablePolicy):
    """Its own codec: nothing is kept between steps."""

    smallest: int

    def codec(self, module: nn.Module) -> "Bfloat16":
        return self

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
        if values.dtype != torch.float32 or values.numel() < self.smallest:
            return None
        return (values.contiguous().to(torch.bfloat16),), _widen


def _widen(codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return codes[0].to(dtype)
