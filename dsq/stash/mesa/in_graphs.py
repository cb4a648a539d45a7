"""How compiled graphs keep what they save in 8 bits, in running ranges.

The graph has two operators. The one that codes asks the forward that runs for the range, which is no part of the graph:
a tensor's range goes by the name of its node, and its turn where graphs have the same names (blocks of one class).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import Node

from dsq.kernels.affine import affine_unpack
from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.operators import define
from dsq.stash.mesa.running_ranges import BITS, RunningRanges
from dsq.stash.saved_tensors.affine import AffineGroups
from dsq.stash.saved_tensors.compiled_graphs.calls import call


class CodingForward(Protocol):
    """A forward under mesa, seen from a graph: observed_forward.ObservedForward."""

    def code(self, name: str, values: Tensor, groups: Groups) -> AffineGroups:
        """The codes of values in memory order, in the running range of that name."""
        ...


_RUNNING: ContextVar[CodingForward] = ContextVar("the forward whose graphs run")


@contextmanager
def graphs_ask(forward: CodingForward) -> Iterator[None]:
    """Let graphs that run inside ask ``forward`` for ranges."""
    token = _RUNNING.set(forward)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def grouped_axis(shape: Sequence[int], heads: int) -> int:
    """That of a tensor whose operation is not known: an axis of heads, else the channels, which come last."""
    return 1 if len(shape) == 4 and shape[1] == heads else len(shape) - 1


@dataclass(frozen=True)
class RangesInGraphs:
    """8 bits in groups along one axis, whose ranges a forward knows."""

    heads: int
    few: int = 1

    def pack(self, x: Node, order: Sequence[int], values: Node, flat: Node) -> Node:
        return call(torch.ops.dsq.pack_in_range.default, values, *self._grouping(x, order), x.name)

    def unpack(
        self, x: Node, order: Sequence[int], parts: Sequence[Node], sizes: Sequence[int | Node], count: int | Node
    ) -> Node:
        grouping, dtype = self._grouping(x, order), x.meta["val"].dtype
        return call(torch.ops.dsq.unpack_in_range.default, *parts, sizes, *grouping, dtype)

    def _grouping(self, x: Node, order: Sequence[int]) -> tuple[int, int]:
        """The axis of the values in memory order, and how many groups it is cut into."""
        shape = x.meta["val"].shape
        axis = grouped_axis(shape, self.heads)
        return order.index(axis), gcd(int(shape[axis]), self.heads)


def _groups(sizes: Sequence[int], axis: int, groups: int) -> Groups:
    return Groups(prod(sizes[axis:]) // groups, groups)


def _pack(values: Tensor, axis: int, groups: int, name: str) -> tuple[Tensor, Tensor]:
    forward, grouped = _RUNNING.get(None), _groups(values.shape, axis, groups)
    if forward is None:  # a block called by itself: a tensor's own range serves
        coded = RunningRanges(0.0, "nearest", 0).pack(name, values, grouped)
    else:
        coded = forward.code(name, values, grouped)
    return coded.codes, coded.ranges.view(torch.uint8)  # as bytes: hooks code floats


def _unpack(codes: Tensor, ranges: Tensor, sizes: list[int], axis: int, groups: int, dtype: torch.dtype) -> Tensor:
    coded = AffineCodes(codes, ranges.view(torch.promote_types(dtype, torch.float32)))
    return affine_unpack(coded, BITS, _groups(sizes, axis, groups), prod(sizes), dtype).view(sizes)


def _fake_pack(values: Tensor, axis: int, groups: int, name: str) -> tuple[Tensor, Tensor]:
    nbytes = groups * torch.promote_types(values.dtype, torch.float32).itemsize
    return values.new_empty(values.numel(), dtype=torch.uint8), values.new_empty((2, nbytes), dtype=torch.uint8)


def _fake_unpack(codes: Tensor, ranges: Tensor, sizes: list[int], axis: int, groups: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(sizes, dtype=dtype)


define("pack_in_range(Tensor values, int axis, int groups, str name) -> (Tensor, Tensor)", _pack, _fake_pack)
define(
    "unpack_in_range(Tensor codes, Tensor ranges, SymInt[] sizes, int axis, int groups, ScalarType dtype) -> Tensor",
    _unpack,
    _fake_unpack,
)
