"""Compiled graphs that pack what they save, and unpack each tensor just before its first use.

Hooks unpack all that a graph saved when its backward begins. Where inductor divides a joint graph into forward and
backward, the forward is made to give codes and scales in place of a tensor, and the backward to unpack them.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from inspect import getfile
from typing import Any

import torch
import torch._inductor.config
from torch import SymInt, Tensor
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import is_sym_node

from dsq.stash.saved_tensors.compiled_graphs.calls import call
from dsq.stash.saved_tensors.compiled_graphs.exact import MARK
from dsq.stash.saved_tensors.forward_stash import GraphPacking

aten = torch.ops.aten


def graphs_pack(packing: GraphPacking) -> AbstractContextManager[Any]:
    """Let graphs that inductor compiles inside pack the tensors that they save."""
    config: Any = torch._inductor.config
    divide = config.custom_partitioner_fn or min_cut_rematerialization_partition
    patch: AbstractContextManager[Any] = config.patch(custom_partitioner_fn=Divide(packing, divide))
    return patch


@dataclass(frozen=True)
class Divide(CustomPartitionerFn):
    """Divides a joint graph as ``divide`` does, and packs what the forward saves, but for what MarkExact marked."""

    packing: GraphPacking
    divide: Callable[..., tuple[GraphModule, GraphModule]]

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        forward, backward = self.divide(gm, joint_inputs, **options)
        boundary = _Boundary(forward, backward, options["num_fwd_outputs"])
        boundary.save_decisions()
        for tensor in filter(self._wanted, boundary.saved.copy()):
            boundary.pack(tensor, self.packing)
        boundary.close()
        return forward, backward

    def _wanted(self, node: Node) -> bool:
        if node.op == "placeholder" or MARK in node.meta or not _is_float(node):
            return False
        return bool(node.meta["val"].numel() > self.packing.few)

    def uuid(self) -> Any:  # of the cache of compiled graphs
        own = self.divide.uuid() if isinstance(self.divide, CustomPartitionerFn) else None
        return get_hash_for_files((__file__, getfile(type(self.packing))), f"{self.packing} {own}")


class _Boundary:
    """What the forward saves, and the inputs of the backward of the same names.

    Of what is saved tensors come first, of the backward's inputs sizes.
    """

    def __init__(self, forward: GraphModule, backward: GraphModule, results: int) -> None:
        self.forward, self.backward, self.results = forward, backward, results
        self.output = forward.graph.output_node()
        self.saved: list[Node] = list(self.output.args[0][results:])  # type: ignore[arg-type, index]
        self.inputs: dict[str, Node] = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}

    def save_decisions(self) -> None:
        """Save what the backward would compare again (the mask of a ReLU): rounded values would decide otherwise."""
        if not self.saved:
            return
        known, first = {node.name: node for node in self.forward.graph.nodes}, self.saved[0]
        for node in list(self.backward.graph.nodes):
            value, inputs = node.meta.get("val"), node.all_input_nodes
            if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype != torch.bool:
                continue
            if not any(map(_is_float, inputs)) or any(x.name not in known for x in inputs):
                continue
            with self.forward.graph.inserting_before(self.output):
                given = self.forward.graph.node_copy(node, lambda x: known[x.name])
            self.saved.insert(self.saved.index(first), given)
            node.replace_all_uses_with(self._input(given, before=self.inputs[first.name]))
            self.backward.graph.erase_node(node)

    def pack(self, x: Node, packing: GraphPacking) -> None:
        """Save the two parts of ``x``, packed, in its place."""
        value, unpacked = x.meta["val"], self.inputs.pop(x.name)
        order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
        with self.forward.graph.inserting_before(self.output):
            values = call(aten.permute.default, x, order)
            flat = call(aten.reshape.default, values, [-1])
            packed = packing.pack(x, order, values, flat)
            parts = [call(operator.getitem, packed, part) for part in range(2)]
        index = self.saved.index(x)
        self.saved[index : index + 1] = parts
        given = [self._input(part, before=unpacked) for part in parts]
        sizes, count = [self._size(x, dim) for dim in order], self._size(flat, 0)
        with self.backward.graph.inserting_before(min(unpacked.users)):
            again = packing.unpack(x, order, given, sizes, count)
            inverse = [order.index(dim) for dim in range(value.dim())]
            again = call(aten.permute.default, call(aten.reshape.default, again, sizes), inverse)
        unpacked.replace_all_uses_with(again)
        self.backward.graph.erase_node(unpacked)

    def close(self) -> None:
        """Make the graphs whole."""
        self.output.args = ((*self.output.args[0][: self.results], *self.saved),)  # type: ignore[index, misc]
        saved = [SavedForBackwardsAOTOutput(index) for index in range(len(self.saved))]
        self.output.meta["desc"] = [*self.output.meta["desc"][: self.results], *saved]
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()

    def _size(self, x: Node, dim: int) -> int | Node:
        """A size of the forward's ``x`` as the backward knows it."""
        size = x.meta["val"].shape[dim]
        if not isinstance(size, SymInt):
            return int(size)
        for node in self.inputs.values():
            known = node.meta["val"]
            if isinstance(known, SymInt) and known.node.expr == size.node.expr:
                return node
        with self.forward.graph.inserting_before(self.output):
            given = call(aten.sym_size.int, x, dim)
        sizes = sum(is_sym_node(node) for node in self.saved)
        self.saved.insert(len(self.saved) - sizes, given)
        return self._input(given, before=next(iter(self.backward.graph.nodes)))

    def _input(self, saved: Node, before: Node) -> Node:
        with self.backward.graph.inserting_before(before):
            node = self.backward.graph.placeholder(saved.name)
        node.meta, node.target = copy(saved.meta), node.name  # its argument's name: no other node's
        self.inputs[node.name] = node
        return node


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
