"""Which tensors a compiled graph may hand to a quantising policy: decided in the graph, as its results have no history.

Marked are those that policies keep exact in eager mode: statistics (mean and deviation of a norm, attention's
logsumexp), what a loss keeps, what no gradient flows through (masks, tables of rotations), and casts of weights.
PyTorch keeps a marked tensor on the autograd function itself, which no hook sees: it is meant for tensors saved without
a check of their version.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

#: in a node's meta: the tensor is to stay exact
MARK = "saved_tensor_with_no_vc_check"
_SIGNS = (aten.threshold_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default)
#: which arguments an operation divides by or compares: of rounded ones its result would be zero, infinite or another
_SINGULAR = {
    aten.div.Tensor: (1,),
    aten.reciprocal.default: (0,),
    aten.pow.Tensor_Tensor: (0,),
    aten.eq.Tensor: (0, 1),
    aten.sign.default: (0,),
    aten.sgn.default: (0,),
    aten.digamma.default: (0,),
    aten.polygamma.default: (1,),
}
#: what losses begin with: compilers take them apart, and say by a copy of the operator what each part was of
_LOSSES = ("aten._log_softmax.default", "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_STATISTIC = 16  #: a statistic has at most one value for so many of what it is made of


@contextmanager
def marked(block: nn.Module) -> Iterator[None]:
    """Mark what is to stay exact in graphs of the block that are compiled inside, by inductor or AOTAutograd alone.

    Their backward may run more than once (gact's measurements): it must not write into what it is given.
    """
    tensors = (*block.parameters(), *block.buffers())
    mark = MarkExact(tuple(sorted({tuple(tensor.shape) for tensor in tensors})))
    own: Any = torch._inductor.config.joint_custom_post_pass
    passes: Any = [*(own if isinstance(own, (list, tuple)) else [own] if own else []), mark]
    with (
        torch._inductor.config.patch(joint_custom_post_pass=passes),
        torch._functorch.config.patch(joint_custom_pass=mark.module, donated_buffer=False),
    ):
        yield


@dataclass(frozen=True)
class MarkExact(CustomGraphPass):
    """Marks the tensors of a joint graph of forward and backward that must not be quantised."""

    weights: tuple[tuple[int, ...], ...]  #: shapes of the block's parameters and buffers: graphs do not name them

    def __call__(self, graph: Graph) -> None:
        activations: set[Node] = set()  # what depends on an input that is no weight
        differentiable = _differentiable(graph)  # ... on an input that gets a gradient
        statistics: set[Node] = set()
        losses, singular = _of_losses(graph), _singular(graph)
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder":
                if isinstance(value, Tensor) and tuple(value.shape) not in self.weights:
                    activations.add(node)
                    if node in singular and value.is_floating_point():
                        node.meta[MARK] = True
                continue
            inputs = node.all_input_nodes
            if not activations.isdisjoint(inputs):
                activations.add(node)
            if not differentiable.isdisjoint(inputs):
                differentiable.add(node)
            if _is_statistic(node, [i for i in inputs if i in activations], statistics):
                statistics.add(node)
            if not isinstance(value, Tensor):
                continue
            exact = node in statistics or node in losses or node in singular or _decides(node)
            if exact or node not in activations or node not in differentiable:
                node.meta[MARK] = True
            elif value.dtype == torch.bool:  # made again of rounded values it would be another
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def module(self, module: GraphModule, inputs: Any) -> GraphModule:
        """The same, as AOTAutograd calls it."""
        self(module.graph)
        return module

    def uuid(self) -> Any:  # of the cache of compiled graphs
        return get_hash_for_files((__file__,), repr(self.weights))


def _differentiable(graph: Graph) -> set[Node]:
    """The graph's inputs that get a gradient."""
    descriptions = graph.output_node().meta["desc"]
    wanted = {out.grad_of for out in descriptions if hasattr(out, "grad_of")}
    return {node for node in graph.find_nodes(op="placeholder") if node.meta["desc"] in wanted}


def _of_losses(graph: Graph) -> set[Node]:
    """What losses compute, and what they are given, through views and casts."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if str(node.meta.get("original_aten")) in _LOSSES:
            found.update((node, *node.all_input_nodes))
        elif node in found and _same_values(node):
            found.update(node.all_input_nodes)
    return found


def _singular(graph: Graph) -> set[Node]:
    """What the graph divides by or compares, through views, casts and factors."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        for user in node.users:
            factor = user.target in (aten.mul.Tensor, aten.mul.Scalar, aten.neg.default)
            same = user in found and len(user.all_input_nodes) == 1 and (factor or _same_values(user))
            if same or any(user.args[i] is node for i in _singular_arguments(user)):
                found.add(node)
    return found


def _singular_arguments(node: Node) -> tuple[int, ...]:
    if node.target is aten.pow.Tensor_Scalar:
        return (0,) if float(node.args[1]) < 1 else ()  # type: ignore[arg-type]
    return _SINGULAR.get(node.target, ())  # type: ignore[call-overload, no-any-return]


def _same_values(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    view = schema is not None and any(result.alias_info for result in schema.returns)
    return view or node.target in (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


def _decides(node: Node) -> bool:
    """Whether a backward looks at the node's sign: a small value must not become zero. (Inductor makes it a mask.)"""
    return any(user.target in _SIGNS and node in user.args[1:] for user in node.users)


def _is_statistic(node: Node, made_of: list[Node], statistics: set[Node]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not made_of:
        return False
    second = False  # of an operation of several results: attention's logsumexp, a norm's mean
    if made_of[0].op == "call_function" and isinstance(made_of[0].meta.get("val"), tuple):
        second, made_of = bool(node.args[1] != 0), made_of[0].all_input_nodes
    values = [i.meta["val"] for i in made_of if isinstance(i.meta.get("val"), Tensor)]
    largest = max((v.numel() for v in values), default=0)
    if second:
        return bool(value.numel() < largest)
    of_statistics = value.numel() <= largest and statistics.issuperset(made_of)
    return bool(of_statistics or value.numel() * _STATISTIC <= largest)
