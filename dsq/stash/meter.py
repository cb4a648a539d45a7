"""The meter: the bytes that a forward saves for its backward, wherever the graph holds them.

The autograd graph is weighed from the outputs back. A node holds bytes in two ways, and both are counted: saved tensors
(as they are, or as the object into which a saved-tensor hook packed them) and what a custom Function put on its ctx,
tensors in lists, tuples, dicts and dataclasses.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.controller import Controller
from dsq.stash.memory import is_weight
from dsq.stash.segment_inputs import saved_behind


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One storage saved for the backward, under the first (oldest) node that holds it."""

    op: str  #: the autograd node, ReluBackward0 say
    name: str  #: the attribute that holds it: "result", "saved_tensors", or that of a ctx
    shape: tuple[int, ...]
    dtype: str
    nbytes: int  #: of the whole storage, which is what stays allocated


@dataclass(frozen=True)
class StashProfile:
    """The tensors that a forward saves for its backward, as ``measure`` found them."""

    tensors: tuple[SavedTensor, ...]  #: largest first

    @property
    def nbytes(self) -> int:
        """Return the bytes held for the backward."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def exact(self) -> dict[str, int]:
        """Return the bytes of what PyTorch's own operations hold, by operation, largest first: those without a rule in
        dsq/stash/rules, or all where no policy is applied."""
        nbytes = Counter[str]()
        for tensor in self.tensors:
            name, _, number = tensor.op.rpartition("Backward")
            if number.isdigit():  # an autograd function's, as those of rules, has none
                nbytes[name] += tensor.nbytes
        return dict(nbytes.most_common())

    def __str__(self) -> str:
        lines = [f"{t.nbytes / 2**20:9.2f}  {t.op}.{t.name} {t.shape} {t.dtype}" for t in self.tensors[:20]]
        return "\n".join((f"{self.nbytes / 2**20:.2f} MiB saved for the backward", *lines))


def measure(fn: Callable[[], Any]) -> StashProfile:
    """Run ``fn`` and count the bytes that its result saves for the backward.

    Args:
        fn: a forward without arguments, ``lambda: model(x).sum()``; whatever it returns (a tensor, or tensors in lists,
            tuples, dicts and dataclasses) must need a gradient.
    Returns:
        StashProfile. Bytes are those at the end of the forward; weights, and tensors that were there before it (the
        caller's batch), are not among them, nor are sparse ones.
    Raises:
        TypeError: ``fn`` cannot be called. ValueError: nothing it returned needs a gradient.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
    before = [StorageWeakRef(tensor.untyped_storage()) for tensor in _live_tensors()]  # their addresses stay taken
    roots = [tensor for tensor in reachable(fn()) if tensor.grad_fn is not None]
    if not roots:
        raise ValueError("fn must return a tensor that needs a gradient (is it under no_grad, or all frozen?)")
    counted, tensors = {ref.cdata for ref in before}, []
    for node in _nodes(roots):
        for name, thing in _held_by(node):
            for tensor in reachable(thing):
                storage = tensor.untyped_storage()
                if is_weight(tensor) or storage._cdata in counted:
                    continue
                counted.add(storage._cdata)
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors.append(SavedTensor(node.name(), name, tuple(tensor.shape), dtype, storage.nbytes()))
    return StashProfile(tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes)))


def _live_tensors() -> Iterator[Tensor]:
    """Yield every tensor with a storage that Python's collector knows; a compiler's have none, nor have vmap's."""
    for thing in gc.get_objects():
        kind = type(thing)
        strided = issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) and thing.layout is torch.strided
        if strided and not is_functorch_wrapped_tensor(thing):
            yield thing


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph, oldest first, and of the histories of tensors that nodes hold."""
    nodes: dict[int, Any] = {}
    unvisited = [t.grad_fn for t in roots]
    while unvisited:
        node: Any = unvisited.pop()
        if node is None or id(node) in nodes:
            continue
        nodes[id(node)] = node
        unvisited += [child for child, _ in node.next_functions]
        unvisited += [tensor.grad_fn for _, thing in _held_by(node) for tensor in reachable(thing)]
    return sorted(nodes.values(), key=lambda node: node._sequence_nr())


def _held_by(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, object) of what a node holds: saved tensors as they are packed, then attributes of a ctx."""
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:  # this node's tensors were freed by a backward inside fn
                continue
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                if saved is not None and saved.data is not None:
                    yield attribute.removeprefix("_raw_saved_"), saved.data
                    yield "checkpoint", saved_behind(saved.unpack_hook)
    yield from getattr(node, "__dict__", {}).items()


def reachable(thing: Any, visited: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the strided tensors inside nested lists, tuples, dicts and dataclasses."""
    visited = set() if visited is None else visited
    if id(thing) in visited or isinstance(thing, (nn.Module, Controller, type)):
        return
    visited.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.layout is torch.strided:  # a sparse tensor has no storage of its own
            yield thing
        return
    parts: Iterable[Any] = ()
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = thing
    elif isinstance(thing, torch._C._autograd.SavedTensor):
        parts = (thing.data,)  # type: ignore[attr-defined]  # the stubs are behind
    elif is_dataclass(thing):
        parts = [getattr(thing, field.name, None) for field in fields(thing)]
    for part in parts:
        yield from reachable(part, visited)
