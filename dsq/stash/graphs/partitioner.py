"""The packed stash of a compiled graph: a partitioner of torch.compile that codes what the forward saves for the
backward.

    torch.compile(model, options={"custom_partitioner_fn": PackedPartitioner(lambda: 6)})

Each step is a function below, in this order:

    tag                   before the cut: save x^ of norms and softmax; keep exact what losses read
    (PyTorch's min-cut)    save what products need, recompute whatever costs no product
    _recompute_attention   from the decoded q, k and v, so that its sums fit them
    _save_masks            of comparisons with values that will be rounded
    _pack                  encode each saved tensor behind its maker, decode it before its first reader

Nothing else of the graph changes, so a partition of 0 bits gives PyTorch's gradients, bit for bit.
"""

import operator
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from dsq.kernels.backend import FLOATS
from dsq.stash.graphs import codec, joint_graph
from dsq.stash.graphs.codec import BLOCK_SIZE, MASK_WORD, RowLayout, decode, decode_mask, encode, encode_mask
from dsq.stash.graphs.joint_graph import (
    ATTENTION,
    EXACT,
    activation_inputs,
    ancestors,
    copy_of,
    is_bool,
    is_floating,
    is_statistic,
    numel,
    products_of_norms,
    results_of,
    static_inputs,
    tag,
    tensor_of,
)
from dsq.stash_bits import MAX_EXACT_NUMEL

aten = torch.ops.aten
_UNCHECKED = "saved_tensor_with_no_vc_check"  #: PyTorch's key: no version is checked; such tensors are saved last


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
        memory_budget: the share of the bytes, which PyTorch's own cut of a graph saves, that is not to be exceeded; the
            least share of products is recomputed that meets it. None: ``recomputed_products`` says which.
    """

    def __init__(
        self, bits: Callable[[], int], recomputed_products: float = 0.0, memory_budget: float | None = None
    ) -> None:
        self.options = bits, recomputed_products, memory_budget
        self.bits, self.recomputed_products, self.memory_budget = self.options
        self.graphs: list[tuple[PackedTensor, ...]] = []  #: the saved tensors of each graph cut so far
        self.choices: list[str] = []  #: what met the budget in each of them

    def uuid(self) -> Any:
        options = self.bits(), self.recomputed_products, self.memory_budget
        return get_hash_for_files((__file__, joint_graph.__file__, codec.__file__), repr(options))

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
        text = f"{len(self.graphs)} graphs save {raw:.1f} MiB as {saved:.1f} MiB; exact: {names or 'none'}"
        return "; ".join([text, *dict.fromkeys(self.choices)])

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # the backward of a norm computes x^ anew before
        if self.memory_budget is None:
            cut = self._cut(gm, joint_inputs, kwargs, self.recomputed_products)
        else:
            cut = self._meet(self.memory_budget, gm, joint_inputs, kwargs)
        if cut.tensors:
            self.graphs.append(cut.tensors)
        cut.finish()
        return cut.forward, cut.backward

    def _cut(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], kwargs: dict[str, Any], share: float) -> "_Cut":
        """Return the two graphs, with the share of products recomputed."""
        bits, outputs, static = self.bits(), kwargs["num_fwd_outputs"], static_inputs(kwargs)
        tag(gm.graph, outputs, static, bits > 0, share)
        activations = activation_inputs(gm.graph, outputs, static)
        with functorch_config.patch(aggressive_recomputation=True, recompute_views=True):
            cut = _Cut(*min_cut_rematerialization_partition(gm, joint_inputs, **kwargs), outputs, activations)
        _recompute_attention(cut)
        if bits:
            _save_masks(cut)
            cut.tensors = tuple(_pack(cut, bits))
        return cut

    def _meet(self, budget: float, gm: fx.GraphModule, joint_inputs: Sequence[Any], kwargs: dict[str, Any]) -> "_Cut":
        """Return the cut with the fewest recomputed products that saves at most ``budget`` of what PyTorch's own cut
        does. If none does, raise ValueError in the first graph, and warn in later ones: a training goes on."""
        outputs, cuts = kwargs["num_fwd_outputs"], dict[int, _Cut]()
        activations = activation_inputs(gm.graph, outputs, static_inputs(kwargs))
        exact = _Cut(*min_cut_rematerialization_partition(copy_of(gm), joint_inputs, **kwargs), outputs, activations)
        count = len(products_of_norms(ancestors(results_of(gm.graph)[:outputs])))

        def meets(products: int) -> bool:
            cuts[products] = self._cut(copy_of(gm), joint_inputs, kwargs, products / max(count, 1))
            return cuts[products].saved_bytes() <= budget * exact.saved_bytes()

        products = bisect_left(range(count + 1), True, key=meets)
        share = cuts[min(products, count)].saved_bytes() / max(exact.saved_bytes(), 1)
        if products > count:
            minimum = f"at least {ceil(100 * share) / 100} for this graph, of {self.bits() or 'all'} bits"
            if not self.choices:
                raise ValueError(f"memory_budget must be {minimum}, got {budget}")
            warnings.warn(f"memory_budget is exceeded: it has to be {minimum}", stacklevel=2)
            products = count
        self.choices.append(f"{products} of {count} products recomputed for {share:.2f} of the bytes")
        return cuts[products]


class _Cut:
    """The two graphs, and what one saves for the other."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, activations: set[str]) -> None:
        self.forward, self.backward, self.activations = forward, backward, activations
        results = results_of(forward.graph)
        self.results, self.saved = results[:outputs], results[outputs:]
        self.tensors: tuple[PackedTensor, ...] = ()  #: of ``saved``, as they are coded
        self.inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}

    def layout(self, node: fx.Node) -> RowLayout | None:
        """Return the rows in which a saved tensor is coded; None if it is saved exact."""
        x = tensor_of(node)
        if x is None or node in self.results or node.meta.get(EXACT) or numel(node) <= MAX_EXACT_NUMEL:
            return None
        if not self.is_activation(node):
            return None
        if x.dtype is torch.bool:
            return RowLayout.of(x, MASK_WORD)
        return RowLayout.of(x, BLOCK_SIZE) if x.dtype in FLOATS and not is_statistic(node) else None

    def saved_bytes(self) -> int:
        """Return the bytes of activations among the saved tensors."""
        return sum(
            numel(n) * n.meta["val"].itemsize for n in self.saved if tensor_of(n) is not None and self.is_activation(n)
        )

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
        has_inputs = all(a.name in names for a in call.all_input_nodes)
        if call.target not in ATTENTION or call.meta.get(EXACT) or not has_inputs:
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
    coded = [node for node in cut.saved if cut.layout(node) is not None and not is_bool(node)]
    for mask in [node for node in graph.nodes if is_bool(node) and node.op == "call_function"]:
        chain = sorted(ancestors([mask], lambda node: node.op == "placeholder"))
        sources = {node.name for node in chain if node.op == "placeholder"}
        rounded = next((node for node in coded if node.name in sources), None)
        if (
            rounded is None
            or not sources <= forward.keys()
            or all(map(is_bool, mask.users))
            or numel(mask) <= MAX_EXACT_NUMEL
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


def _pack(cut: _Cut, bits: int) -> Iterator[PackedTensor]:
    """Encode each saved tensor behind its maker and decode it before its first reader; yield what is saved.

    Encoding at the end of the forward would keep all tensors alive until then, and so would decoding at the begin of
    the backward.
    """
    for node in [node for node in cut.saved if tensor_of(node) is not None]:
        x, layout = node.meta["val"], cut.layout(node)
        shape, size = tuple(optimization_hint(n, 0) for n in x.shape), numel(node)
        if layout is None:
            if is_floating(node) and cut.is_activation(node) and size > MAX_EXACT_NUMEL and not is_statistic(node):
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
        yield PackedTensor(node.name, shape, x.dtype, width, sum(numel(c) * c.meta["val"].itemsize for c in codes))


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
