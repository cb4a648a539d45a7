"""How compiled graphs pack in block floating point."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dsq.stash.saved_tensors.compiled_graphs.calls import call


@dataclass(frozen=True)
class BoxesInGraphs:
    """Boxes over neighbours in memory, rounded to nearest."""

    format: str
    few: int

    def pack(self, x: Node, order: Sequence[int], values: Node, flat: Node) -> Node:
        return call(torch.ops.dsq.pack.default, flat, self.format, 0, None)

    def unpack(
        self, x: Node, order: Sequence[int], parts: Sequence[Node], sizes: Sequence[int | Node], count: int | Node
    ) -> Node:
        return call(torch.ops.dsq.unpack.default, *parts, self.format, [count], 0, x.meta["val"].dtype)
