"""The joint graph of a compiled forward and backward: what its nodes are, and which of them are to be saved.

``tag`` says so to PyTorch's min-cut, by ``CheckpointPolicy``, and to dsq/stash/graphs/partitioner.py, by EXACT.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import _is_primal
from torch._functorch.partitioners import get_default_op_list
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from dsq.stash.graphs.codec import BLOCK_SIZE
from dsq.stash_bits import MAX_EXACT_NUMEL

aten = torch.ops.aten
EXACT = "dsq_exact"  #: key in a node's meta: not to be coded
_LONG_ATTENTION = 16384  #: keys from which recomputing attention takes longer than it saves
MASKS = "attn_mask", "attn_bias"  #: names of the mask of attention: on CPUs, on GPUs
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
#: by which a router of experts chooses: what it chooses from is small, and rounded its gradient loses much
_CHOICES = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default}
_OP_TYPES = get_default_op_list()
#: operators of dsq that cost about as much as reading their input, and draw no random numbers that are no argument
_CHEAP = {"dsq::quantize", "dsq::pack", "dsq::unpack"}


# ---- what a node is


def results_of(graph: fx.Graph) -> list[Any]:
    results: Any = graph.output_node().args[0]
    return list(results)


def static_inputs(kwargs: dict[str, Any]) -> Sequence[int]:
    """Return the places of parameters and buffers among the inputs of a graph that a partitioner is given."""
    return kwargs.get("static_lifetime_input_indices") or ()


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    copy = fx.GraphModule(gm, deepcopy(gm.graph))
    copy.meta.update(gm.meta)
    return copy


def tensor_of(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def is_floating(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_floating_point()


def is_bool(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.bool


def numel(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else optimization_hint(value.numel(), MAX_EXACT_NUMEL)


def _is_costly(node: fx.Node) -> bool:
    """Return whether min-cut must not recompute a call: PyTorch's list of costly operations, attention that is not on
    it, random numbers, integers made of floating values, which of rounded ones would be others, and operators of other
    libraries or higher order, whose cost is unknown."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if _OP_TYPES.is_compute_intensive(node) or node.target in ATTENTION:
        return True
    if node.target.namespace not in ("aten", "prims", "inductor_prims", "prim"):
        return node.target.name() not in _CHEAP
    return torch.Tag.nondeterministic_seeded in node.target.tags or _rounds_to_integers(node)


def _rounds_to_integers(node: fx.Node) -> bool:
    """Return whether a call gives integers of floating values: places of maxima, the experts of a router, a cast."""
    results = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    integers = any(not x.is_floating_point() and x.dtype is not torch.bool for x in results)
    return integers and any(map(is_floating, node.all_input_nodes))


def _is_normalized(node: fx.Node) -> bool:
    """Return whether a node is x^: values times, or divided by, one number a row that a reduction gave."""
    match node.target:
        case aten.mul.Tensor:
            inverses = (aten.rsqrt.default, aten.reciprocal.default)
            rows = [a for a in node.args if isinstance(a, fx.Node) and a.target in inverses]
        case aten.div.Tensor:
            rows = [a for a in node.args[1:] if isinstance(a, fx.Node) and a.op == "call_function"]
        case _:
            return False
    return any(0 < numel(row) * BLOCK_SIZE // 2 <= numel(node) for row in rows)


def is_statistic(node: fx.Node) -> bool:
    """Return whether a node is made, value by value, of what a reduction of a whole block or more gave."""
    todo, size = [node], numel(node)
    for _ in range(8):
        calls = [n for n in todo if n.op == "call_function" and not _is_costly(n)]
        inputs = [(a, n) for n in calls for a in n.all_input_nodes if numel(a) >= BLOCK_SIZE * size]
        # of a large input of the graph, as a table of embeddings, a call may also give a part
        if any(a.op != "placeholder" or torch.Tag.reduction in getattr(n.target, "tags", ()) for a, n in inputs):
            return True
        todo = [a for n in calls for a in n.all_input_nodes if numel(a) <= size]
    return False


def ancestors(nodes: Iterable[Any], stop: Callable[[fx.Node], bool] = lambda node: False) -> dict[fx.Node, None]:
    """Return ``nodes`` and what they are made of, up to and including nodes for which ``stop`` is true."""
    ancestors, todo = dict[fx.Node, None](), [node for node in nodes if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in ancestors:
            ancestors[node] = None
            todo += [] if stop(node) else node.all_input_nodes
    return ancestors


def _argument(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return (dict(zip(names, node.args, strict=False)) | node.kwargs).get(name)


def _stays_exact(attention: fx.Node) -> bool:
    """Return whether attention is saved as PyTorch saves it: with dropout, whose mask is not saved; over many keys,
    where it takes long; and in the forms of other libraries and higher order."""
    if attention.target not in ATTENTION:
        return "flex_attention" in str(attention.target)
    keys: Any = _argument(attention, "key").meta["val"]
    return bool(_argument(attention, "dropout_p")) or optimization_hint(keys.shape[-2], 0) >= _LONG_ATTENTION


# ---- before the cut


def tag(graph: fx.Graph, outputs: int, static: Sequence[int], packs: bool, recomputed_products: float) -> None:
    """Say of nodes of the joint graph what the cut is to save, to recompute, and what is to stay exact."""
    results = results_of(graph)
    forward, weights = ancestors(results[:outputs]), _weights(graph, static)
    for node in forward:
        if _is_costly(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if _is_normalized(node) and node not in weights:
            if packs:
                _read_normalized_values(graph, node, forward)
            if node.target is aten.div.Tensor or any(user not in forward for user in node.users):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    losses = [node for node in results[:outputs] if isinstance(node, fx.Node) and numel(node) == 1]
    losses += [node for node in forward if node.target is aten.log.default and is_statistic(node)]
    attentions = [q for node in forward if _stays_exact(node) for q in (node, *node.all_input_nodes)]
    routers = [source for node in forward if node.target in _CHOICES for source in node.all_input_nodes]
    masks = [_argument(node, name) for node in forward if node.target in ATTENTION for name in MASKS]
    ends = [*losses, *attentions, *routers, *masks]
    constants = {node for node in forward.keys() - _of_values(graph) if is_floating(node)}
    for node in weights | constants | ancestors(ends, lambda node: _is_costly(node) or _is_normalized(node)).keys():
        node.meta[EXACT] = True
    products = products_of_norms(forward)
    for node in products[: round(recomputed_products * len(products))]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def products_of_norms(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the products of normalized values, the largest first."""
    products = [node for node in nodes if node.target in (aten.mm.default, aten.addmm.default)]
    products = [node for node in products if any(map(_comes_from_norm, node.all_input_nodes))]
    return sorted(products, key=numel, reverse=True)


def _comes_from_norm(factor: fx.Node) -> bool:
    """Return whether a factor of a product is made of normalized values without another product."""
    chain = ancestors([factor], lambda node: _is_costly(node) or _is_normalized(node))
    return any(_is_normalized(node) for node in chain)


def _read_normalized_values(graph: fx.Graph, node: fx.Node, forward: dict[fx.Node, None]) -> None:
    """Let the backward read x^ / r in place of the x in x^ = x * r: an RMS norm that is written out would save both."""
    if node.target is not aten.mul.Tensor:
        return
    values, inverse = sorted(node.all_input_nodes, key=numel, reverse=True)
    same_kind = all(getattr(values.meta["val"], name) == getattr(node.meta["val"], name) for name in ("shape", "dtype"))
    readers = [user for user in values.users if user not in forward]
    if readers and same_kind:
        with graph.inserting_after(node):
            quotient = graph.call_function(aten.div.Tensor, (node, inverse))
        quotient.meta = {"val": values.meta["val"]}
        for reader in readers:
            reader.replace_input_with(values, quotient)


def _weights(graph: fx.Graph, static: Sequence[int]) -> set[fx.Node]:
    """Return the parameters and buffers, and what is made of them alone, as a weight of a parametrization."""
    weights = {node for i, node in enumerate(filter(_is_primal, graph.nodes)) if i in static}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            weights.add(node)
    return weights


def _of_values(graph: fx.Graph) -> set[fx.Node]:
    """Return the floating inputs, and what is made of them.

    Other values, such as a mask of 0 and -inf that is added to scores, are constants and places: they may be infinite,
    which no block holds.
    """
    of_values = {node for node in filter(_is_primal, graph.nodes) if is_floating(node)}
    for node in graph.nodes:
        if not of_values.isdisjoint(node.all_input_nodes):
            of_values.add(node)
    return of_values


def activation_inputs(graph: fx.Graph, outputs: int, static: Sequence[int]) -> set[str]:
    """Return the names of the graph's inputs that earlier layers made: they have a gradient, and are no parameters."""
    primals = zip(filter(_is_primal, graph.nodes), results_of(graph)[outputs:], strict=False)
    return {node.name for i, (node, gradient) in enumerate(primals) if i not in static and gradient is not None}
