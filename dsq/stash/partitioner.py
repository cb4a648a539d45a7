"""The packed stash of a compiled graph: a partitioner of torch.compile that codes what the forward saves for the
backward.

    torch.compile(model, options={"custom_partitioner_fn": PackedPartitioner(lambda: 6)})

Each step is a function below, in this order:

    _tag                   before the cut: save x^ of norms and softmax; keep exact what losses read
    (PyTorch's min-cut)    save what products need, recompute whatever costs no product
    _recompute_attention   from the decoded q, k and v, so that its sums fit them
    _save_masks            of comparisons with values that will be rounded
    _pack                  encode each saved tensor behind its maker, decode it before its first reader

Nothing else of the graph changes, so a partition of 0 bits gives PyTorch's gradients, bit for bit.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import _is_primal
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from dsq.kernels.backend import FLOATS
from dsq.stash import graph_codec
from dsq.stash.graph_codec import BLOCK_SIZE, MASK_WORD, RowLayout, decode, decode_mask, encode, encode_mask
from dsq.stash_bits import MAX_EXACT_NUMEL

aten = torch.ops.aten
_EXACT = "dsq_exact"  #: key in a node's meta: not to be coded
_UNCHECKED = "saved_tensor_with_no_vc_check"  #: PyTorch's key: no version is checked; such tensors are saved last
_LONG_ATTENTION = 16384  #: keys from which recomputing attention takes longer than it saves
_ATTENTION = {
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


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor that a compiled forward saves; sizes that are symbolic as they were in the first call."""

    name: str  #: of the graph's node
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int  #: a value, 1 of a mask; 0 if it is saved exact
    saved_bytes: int

    @property
    def raw_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PackedPartitioner(CustomPartitionerFn):
    """Cuts a joint graph into forward and backward, and codes what the first saves for the second.

    Args:
        bits: gives the width of a code, 2 to 8, each time a graph is compiled; 0 saves tensors exact.
        recomputed_products: the share of products of normalized values (fc1, then q, k and v) that the backward
            computes again, the largest first.
    """

    def __init__(self, bits: Callable[[], int], recomputed_products: float = 0.0) -> None:
        self.bits, self.recomputed_products = bits, recomputed_products
        self.graphs: list[tuple[PackedTensor, ...]] = []  #: the saved tensors of each graph cut so far

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, graph_codec.__file__), repr((self.bits(), self.recomputed_products)))

    def __reduce__(self) -> Any:
        return bytes, (self.uuid(),)  # PyTorch's caches of compiled graphs pickle it for their keys

    def __deepcopy__(self, memo: Any) -> "PackedPartitioner":
        return self  # PyTorch copies its config where it writes a graph down

    def summary(self) -> str:
        """Return a line on what the graphs cut so far save."""
        tensors = [tensor for graph in self.graphs for tensor in graph]
        if not tensors:
            return "no graph was cut here: none ran, PyTorch has it on disk, or the backend saves tensors exact"
        raw, saved = (sum(getattr(t, name) for t in tensors) / 2**20 for name in ("raw_bytes", "saved_bytes"))
        exact = [f"{tensor.name} {list(tensor.shape)}" for tensor in tensors if not tensor.bits]
        names = ", ".join(exact[:4]) + f" and {len(exact) - 4} more" * (len(exact) > 4)
        return f"{len(self.graphs)} graphs save {raw:.1f} MiB as {saved:.1f} MiB; exact: {names or 'none'}"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        bits, outputs = self.bits(), kwargs["num_fwd_outputs"]
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # the backward of a norm computes x^ anew before
        static = kwargs.get("static_lifetime_input_indices") or ()
        _tag(gm.graph, outputs, static, bits > 0, self.recomputed_products)
        activations = _activation_inputs(gm.graph, outputs, static)
        with functorch_config.patch(aggressive_recomputation=True, recompute_views=True):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        cut = _Cut(forward, backward, outputs, activations)
        _recompute_attention(cut)
        if bits:
            _save_masks(cut)
            self.graphs.append(tuple(_pack(cut, bits)))
        cut.finish()
        return forward, backward


# ---- what a node is


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _numel(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else optimization_hint(value.numel(), MAX_EXACT_NUMEL)


def _is_costly(node: fx.Node) -> bool:
    """Return whether min-cut must not recompute a call: PyTorch's list of costly operations, attention that is not on
    it, random numbers, integers made of floating values, which of rounded ones would be others, and operators of other
    libraries or higher order, whose cost is unknown."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if _OP_TYPES.is_compute_intensive(node) or node.target in _ATTENTION:
        return True
    if node.target.namespace not in ("aten", "prims", "inductor_prims", "prim"):
        return node.target.name() not in _CHEAP
    return torch.Tag.nondeterministic_seeded in node.target.tags or _rounds_to_integers(node)


def _rounds_to_integers(node: fx.Node) -> bool:
    """Return whether a call gives integers of floating values: places of maxima, the experts of a router, a cast."""
    results = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    integers = any(not x.is_floating_point() and x.dtype is not torch.bool for x in results)
    return integers and any(map(_is_floating, node.all_input_nodes))


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
    return any(0 < _numel(row) * BLOCK_SIZE // 2 <= _numel(node) for row in rows)


def _is_statistic(node: fx.Node) -> bool:
    """Return whether a node is made, value by value, of what a reduction of a whole block or more gave."""
    todo, size = [node], _numel(node)
    for _ in range(8):
        inputs = [a for n in todo if n.op == "call_function" and not _is_costly(n) for a in n.all_input_nodes]
        if any(a.op != "placeholder" and _numel(a) >= BLOCK_SIZE * size for a in inputs):
            return True
        todo = [a for a in inputs if _numel(a) <= size]
    return False


def _ancestors(nodes: Iterable[Any], stop: Callable[[fx.Node], bool] = lambda node: False) -> dict[fx.Node, None]:
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
    if attention.target not in _ATTENTION:
        return "flex_attention" in str(attention.target)
    keys: Any = _argument(attention, "key").meta["val"]
    return bool(_argument(attention, "dropout_p")) or optimization_hint(keys.shape[-2], 0) >= _LONG_ATTENTION


# ---- before the cut


def _tag(graph: fx.Graph, outputs: int, static: Sequence[int], packs: bool, recomputed_products: float) -> None:
    """Say of nodes of the joint graph what the cut is to save, to recompute, and what is to stay exact."""
    results: Any = graph.output_node().args[0]
    forward, weights = _ancestors(results[:outputs]), _weights(graph, static)
    for node in forward:
        if _is_costly(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if _is_normalized(node) and node not in weights:
            if packs:
                _read_normalized_values(graph, node, forward)
            if node.target is aten.div.Tensor or any(user not in forward for user in node.users):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    losses = [node for node in results[:outputs] if isinstance(node, fx.Node) and _numel(node) == 1]
    losses += [node for node in forward if node.target is aten.log.default and _is_statistic(node)]
    attentions = [q for node in forward if _stays_exact(node) for q in (node, *node.all_input_nodes)]
    routers = [source for node in forward if node.target in _CHOICES for source in node.all_input_nodes]
    ends = [*losses, *attentions, *routers]
    for node in weights | _ancestors(ends, lambda node: _is_costly(node) or _is_normalized(node)).keys():
        node.meta[_EXACT] = True
    products = [node for node in forward if node.target in (aten.mm.default, aten.addmm.default)]
    products = [node for node in products if any(map(_comes_from_norm, node.all_input_nodes))]
    products.sort(key=_numel, reverse=True)
    for node in products[: round(recomputed_products * len(products))]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _comes_from_norm(factor: fx.Node) -> bool:
    """Return whether a factor of a product is made of normalized values without another product."""
    chain = _ancestors([factor], lambda node: _is_costly(node) or _is_normalized(node))
    return any(_is_normalized(node) for node in chain)


def _read_normalized_values(graph: fx.Graph, node: fx.Node, forward: dict[fx.Node, None]) -> None:
    """Let the backward read x^ / r in place of the x in x^ = x * r: an RMS norm that is written out would save both."""
    if node.target is not aten.mul.Tensor:
        return
    values, inverse = sorted(node.all_input_nodes, key=_numel, reverse=True)
    alike = all(getattr(values.meta["val"], name) == getattr(node.meta["val"], name) for name in ("shape", "dtype"))
    readers = [user for user in values.users if user not in forward]
    if readers and alike:
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


def _activation_inputs(graph: fx.Graph, outputs: int, static: Sequence[int]) -> set[str]:
    """Return the names of the graph's inputs that earlier layers made: they have a gradient, and are no parameters."""
    results: Any = graph.output_node().args[0]
    primals = zip(filter(_is_primal, graph.nodes), results[outputs:], strict=False)
    return {node.name for i, (node, gradient) in enumerate(primals) if i not in static and gradient is not None}


# ---- after the cut


class _Cut:
    """The two graphs, and what one saves for the other."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, activations: set[str]) -> None:
        self.forward, self.backward, self.activations = forward, backward, activations
        results: Any = forward.graph.output_node().args[0]
        self.results, self.saved = list(results[:outputs]), list(results[outputs:])
        self.inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}

    def layout(self, node: fx.Node) -> RowLayout | None:
        """Return the rows in which a saved tensor is coded; None if it is saved exact."""
        x = _value(node)
        if x is None or node in self.results or node.meta.get(_EXACT) or _numel(node) <= MAX_EXACT_NUMEL:
            return None
        if not self.is_activation(node):
            return None
        if x.dtype is torch.bool:
            return RowLayout.of(x, MASK_WORD)
        return RowLayout.of(x, BLOCK_SIZE) if x.dtype in FLOATS and not _is_statistic(node) else None

    def is_activation(self, node: fx.Node) -> bool:
        """Return whether a saved tensor is no parameter, and nothing that the caller has anyway."""
        return node.op != "placeholder" or node.name in self.activations

    def add(self, node: fx.Node, neighbor: fx.Node) -> fx.Node:
        """Save ``node`` too, beside a saved one; return the backward's input for it."""
        if neighbor.meta.get(_UNCHECKED):
            node.meta[_UNCHECKED] = True
        self.saved.insert(self.saved.index(neighbor), node)
        with self.backward.graph.inserting_before(self.inputs[neighbor.name]):
            placeholder = self.backward.graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
        self.inputs[node.name] = placeholder
        return placeholder

    def erase(self, node: fx.Node) -> None:
        """Save ``node`` no more, whose input nothing reads."""
        self.saved.remove(node)
        self.backward.graph.erase_node(self.inputs.pop(node.name))

    def finish(self) -> None:
        end = self.forward.graph.output_node()
        end.args = ((*self.results, *self.saved),)
        end.meta.pop("desc", None)  # describes the results before
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()


def _recompute_attention(cut: _Cut) -> None:
    """Make attention's result and sums again of the q, k and v that the backward has: without dropout the same numbers.

    It is done after the cut: min-cut itself recomputes no operator that may draw random numbers without their state.
    """
    graph = cut.backward.graph
    names, calls = {node.name: node for node in graph.nodes}, dict[fx.Node, fx.Node]()
    for node in [node for node in cut.saved if node.target is operator.getitem]:
        call: Any = node.args[0]
        known = all(a.name in names for a in call.all_input_nodes)
        if call.target not in _ATTENTION or call.meta.get(_EXACT) or not known:
            continue
        placeholder = cut.inputs[node.name]
        with graph.inserting_before(min(placeholder.users)):
            if call not in calls:
                calls[call] = graph.node_copy(call, lambda a: names[a.name])
            placeholder.replace_all_uses_with(graph.node_copy(node, lambda a: calls[a]))
        cut.erase(node)
    stable_topological_sort(graph)


def _save_masks(cut: _Cut) -> None:
    """Save comparisons in the backward with values that will be rounded, as ReLU's of its result with 0."""
    graph, forward = cut.backward.graph, {node.name: node for node in cut.forward.graph.nodes}
    coded = [node for node in cut.saved if cut.layout(node) is not None and not _is_bool(node)]
    for mask in [node for node in graph.nodes if _is_bool(node) and node.op == "call_function"]:
        chain = sorted(_ancestors([mask], lambda node: node.op == "placeholder"))
        sources = {node.name for node in chain if node.op == "placeholder"}
        rounded = next((node for node in coded if node.name in sources), None)
        if (
            rounded is None
            or not sources <= forward.keys()
            or all(map(_is_bool, mask.users))
            or _numel(mask) <= MAX_EXACT_NUMEL
        ):
            continue  # exact, made of gradients, part of another mask, or small
        for node in chain:
            if node.name not in forward:
                with cut.forward.graph.inserting_after(max(forward[a.name] for a in node.all_input_nodes)):
                    forward[node.name] = cut.forward.graph.node_copy(node, lambda a: forward[a.name])
        mask.replace_all_uses_with(cut.add(forward[mask.name], rounded))
    graph.eliminate_dead_code()
    for node in [node for node in coded if not cut.inputs[node.name].users]:
        cut.erase(node)


def _is_floating(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.is_floating_point()


def _is_bool(node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and value.dtype is torch.bool


def _pack(cut: _Cut, bits: int) -> Iterator[PackedTensor]:
    """Encode each saved tensor behind its maker and decode it before its first reader; yield what is saved.

    Encoding at the end of the forward would keep all tensors alive until then, and so would decoding at the begin of
    the backward.
    """
    for node in [node for node in cut.saved if _value(node) is not None]:
        x, layout = node.meta["val"], cut.layout(node)
        shape, size = tuple(optimization_hint(n, 0) for n in x.shape), _numel(node)
        if layout is None:
            if _is_floating(node) and cut.is_activation(node) and size > MAX_EXACT_NUMEL and not _is_statistic(node):
                yield PackedTensor(node.name, shape, x.dtype, 0, size * x.itemsize)
            continue
        fused, width = x.device.type != "cpu", 1 if x.dtype is torch.bool else bits
        if width == 1:
            coder = partial(encode_mask, layout=layout, fused=fused)
            decoder = partial(decode_mask, layout=layout, fused=fused)
        else:
            coder = partial(encode, bits=bits, layout=layout, fused=fused)
            decoder = partial(decode, bits=bits, layout=layout, dtype=x.dtype, fused=fused)
        codes = _insert(cut.forward.graph, coder, [node], _behind(node), f"{node.name}_encoded")
        inputs, placeholder = [cut.add(code, node) for code in codes], cut.inputs[node.name]
        (values,) = _insert(cut.backward.graph, decoder, inputs, min(placeholder.users), f"{node.name}_decoded")
        placeholder.replace_all_uses_with(values)
        cut.erase(node)
        yield PackedTensor(node.name, shape, x.dtype, width, sum(_numel(c) * c.meta["val"].itemsize for c in codes))


def _behind(node: fx.Node) -> fx.Node:
    """Return the node before which the first reader of ``node`` may stand."""
    after = node.next
    while after.op == "placeholder" or after.target is operator.getitem:
        after = after.next
    return after


def _insert(
    graph: fx.Graph, function: Callable[..., Any], inputs: list[fx.Node], before: fx.Node, name: str
) -> list[fx.Node]:
    """Insert the operations of ``function(inputs)`` before a node; return the nodes of its results."""
    values = [node.meta["val"] for node in inputs]
    with values[0].fake_mode:
        traced = make_fx(function, select_decomp_table(), tracing_mode="symbolic")(*values)
    traced.graph.eliminate_dead_code()
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    results = traced.graph.output_node().args[0]
    nodes = [copies[node] for node in (results if isinstance(results, (list, tuple)) else [results])]
    for index, node in enumerate(nodes):
        node._rename(f"{name}_{index}")
    return nodes
