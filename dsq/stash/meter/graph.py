"""The autograd graph weighed, from the outputs back.

A node holds bytes in two ways, and both are counted: saved tensors (as they are, or as whatever object a saved-tensor
hook packed them into) and attributes that a custom Function put on its ctx.
"""

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.controller import Controller


@dataclass(frozen=True, slots=True)
class Held:
    """One storage kept for the backward, under the first (oldest) node that holds it."""

    module: str  #: innermost module running when the node was made, from the outermost one; "" outside of any
    op: str  #: the autograd node, ReluBackward0 say
    name: str  #: the attribute that holds it: "result", "saved_tensors", or that of a ctx
    shape: tuple[int, ...]
    dtype: str
    device: str  #: "file": mapped into memory, not allocated
    nbytes: int  #: of the whole storage, which is what stays allocated


class GraphMeter:
    """Adds up what graphs hold for the backward; a storage counts once, however many graphs hold it.

    weights: storages that exist anyway (parameters and buffers, the caller's batch), not counted.
    module_at: the name of the module that made the node of a number.
    """

    def __init__(self, weights: set[int], module_at: Callable[[int], str] = lambda number: "") -> None:
        self.held: list[Held] = []
        self._seen = {_PARAMETER, *weights}
        self._module_at = module_at
        self._storages: list[StorageWeakRef] = []  # so that no later storage gets the address of one seen

    def ignore(self, weights: set[int]) -> None:
        """Count these storages no more."""
        self._seen |= weights

    def add(self, roots: Iterable[Tensor], since: int = 0) -> None:
        """Weigh the graph of these tensors; `since`: only nodes from this number on (module_runs.next_node)."""
        for node in _nodes(roots, since):
            for name, thing in _held_by(node):
                for leaf in reachable(thing, []):
                    self._add(self._module_at(node._sequence_nr()), node.name(), name, leaf)

    def add_hidden(self, leaves: Iterable[Tensor]) -> None:
        """Weigh leaves that no graph shows (live_tensors.hidden_leaves)."""
        for leaf in leaves:
            self._add("", "AccumulateGrad", "variable", leaf)

    def _add(self, module: str, op: str, name: str, leaf: Any) -> None:
        key, nbytes = _storage(leaf)
        if key in self._seen:
            return
        self._seen.add(key)
        if isinstance(leaf, Tensor):
            self._storages.append(StorageWeakRef(leaf.untyped_storage()))
        shape = tuple(leaf.shape) if isinstance(leaf, (Tensor, np.ndarray)) else (len(leaf),)
        dtype = str(getattr(leaf, "dtype", "bytes")).removeprefix("torch.")
        device = "file" if _in_file(leaf) else str(getattr(leaf, "device", "cpu"))
        self.held.append(Held(module, op, name, shape, dtype, device, nbytes))


_PARAMETER = 0  #: the key of all parameters: one used outside of any module is no stash either


def _storage(leaf: Any) -> tuple[int, int]:
    if isinstance(leaf, Tensor):
        storage = leaf.untyped_storage()
        return (_PARAMETER if isinstance(leaf, nn.Parameter) else storage._cdata), storage.nbytes()
    if isinstance(leaf, np.ndarray):
        base = leaf
        while isinstance(base.base, np.ndarray):
            base = base.base
        return id(base), base.nbytes
    return id(leaf), len(leaf)


def _in_file(leaf: Any) -> bool:
    """Whether a tensor is a file mapped into memory (gact's level L2)."""
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.untyped_storage().filename is not None


def _nodes(roots: Iterable[Tensor], since: int) -> list[Any]:
    """The nodes of the graph made since that number, oldest first, and of the histories of tensors that nodes hold."""
    found: dict[int, Any] = {}
    queue = deque(t.grad_fn for t in roots)
    while queue:
        node = queue.popleft()
        if node is None or id(node) in found or node._sequence_nr() < since:
            continue
        found[id(node)] = node
        queue.extend(child for child, _ in node.next_functions)
        extra: list[Any] = []
        for _, thing in _held_by(node):
            for _leaf in reachable(thing, extra):
                pass
        queue.extend(extra)
    return sorted(found.values(), key=lambda node: node._sequence_nr())


def _held_by(node: Any) -> Iterator[tuple[str, Any]]:
    """(attribute, object) of what a node holds: saved tensors in their packed form, then the attributes of a ctx."""
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            try:
                raw = getattr(node, attribute)
            except RuntimeError:  # this node's tensors were freed by a backward inside fn
                continue
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                if saved is not None and saved.data is not None:
                    yield attribute.removeprefix("_raw_saved_"), saved.data
                    if getattr(saved.unpack_hook, "__module__", None) == "torch.utils.checkpoint":
                        yield "checkpoint", saved.unpack_hook
    yield from getattr(node, "__dict__", {}).items()


_PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.device)
_OPAQUE = (nn.Module, Controller, type, types.ModuleType, *_PLAIN)


def reachable(thing: Any, nodes: list[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors, arrays and bytes inside an object; autograd nodes met on the way are appended to ``nodes``."""
    seen = set() if seen is None else seen
    if (isinstance(thing, _OPAQUE) and not isinstance(thing, nn.Parameter)) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor) and thing.layout is not torch.strided:
        return  # a sparse tensor has no storage of its own
    if isinstance(thing, (Tensor, np.ndarray, bytes, bytearray)):
        yield thing
        if isinstance(thing, Tensor) and thing.grad_fn is not None:
            nodes.append(thing.grad_fn)  # a held tensor keeps its own history alive
        return
    if isinstance(thing, torch.autograd.graph.Node):
        nodes.append(thing)
        return
    for part in _parts(thing):
        yield from reachable(part, nodes, seen)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from list(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from thing
    elif isinstance(thing, torch._C._autograd.SavedTensor):
        yield thing.data  # type: ignore[attr-defined]  # the stubs are behind
    elif isinstance(thing, partial):
        yield from (thing.args, thing.keywords)
    elif isinstance(thing, types.FunctionType):
        yield from (c.cell_contents for c in thing.__closure__ or () if c != types.CellType())
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
    else:
        yield from list(getattr(thing, "__dict__", {}).values())
        for cls in type(thing).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__weakref__", "__dict__") and hasattr(thing, slot):
                    yield getattr(thing, slot)
