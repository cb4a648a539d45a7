"""The meter: what a forward keeps for its backward, wherever it is held.

The autograd graph is walked from the outputs. A node holds bytes in two ways, and both are counted: saved tensors (as
they are, or as whatever object a saved-tensor hook packed them into) and attributes that a custom Function put on its
ctx. Storages are counted once; parameters and buffers of the modules that ran are not counted: they exist anyway.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from dsq.stash.peak import peak
from dsq.stash.policy import Controller


@dataclass(frozen=True, slots=True)
class Held:
    """One storage kept for the backward, under the first (oldest) node that holds it."""

    module: str  #: innermost module running when the node was made, from the outermost one; "" outside of any
    op: str  #: the autograd node, ReluBackward0 say
    name: str  #: the attribute that holds it: "result", "saved_tensors", or that of a ctx
    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int  #: of the whole storage, which is what stays allocated


@dataclass(frozen=True)
class Report:
    """What `measure` found."""

    held: tuple[Held, ...]  #: largest first
    peak_bytes: int  #: most that PyTorch's allocators held at once, above what they held before

    @property
    def nbytes(self) -> int:
        """Bytes kept for the backward."""
        return sum(h.nbytes for h in self.held)

    def by(self, field: str) -> dict[str, int]:
        """Bytes by "module", "op", "dtype" or "device", largest first."""
        sums: dict[str, int] = {}
        for h in self.held:
            key = str(getattr(h, field))
            sums[key] = sums.get(key, 0) + h.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        lines = [f"{_mib(self.nbytes)} MiB kept for the backward, {_mib(self.peak_bytes)} MiB at the peak"]
        lines += [f"{_mib(n):>9}  {name or '(no module)'}" for name, n in list(self.by("module").items())[:20]]
        lines += [f"{_mib(h.nbytes):>9}  {h.op}.{h.name} {h.shape} {h.dtype}  {h.module}" for h in self.held[:20]]
        return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def measure(fn: Callable[[], Any], backward: bool = False) -> Report:
    """Run ``fn`` and weigh what its result keeps for the backward.

    Args:
        fn: a forward without arguments, ``lambda: model(x).sum()``; whatever it returns (a tensor, or tensors in lists,
            tuples, dicts and dataclasses) must need a gradient.
        backward: run the backward of the result's sum as well, so that the peak covers it; adds into ``.grad``.
    Returns:
        Report. Bytes are those at the end of the forward. The peak is exact for tensors (CUDA: the caching allocator's
        counters; CPU: the allocation events of PyTorch's profiler); scratch that a library allocates by itself is not
        seen.
    Raises:
        TypeError: ``fn`` cannot be called. ValueError: nothing it returned needs a gradient.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
    with _modules_run() as runs, peak() as most:
        result = fn()
        roots = [t for t in _reachable(result, []) if isinstance(t, Tensor) and t.grad_fn is not None]
        if not roots:
            raise ValueError("fn must return a tensor that needs a gradient (is it under no_grad, or all frozen?)")
        held = _weigh(roots, runs)
        if backward:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return Report(held, most.nbytes)


# ---- which module made a node ----


class _Runs:
    """(first sequence number, module) each time the innermost running module changes; autograd numbers its nodes."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.changes: list[tuple[int, nn.Module | None]] = []
        self.names: dict[nn.Module, str] = {}
        self.excluded: set[int] = set()

    def enter(self, module: nn.Module, *_: Any) -> None:
        if not self.stack:
            self.names.update({m: name for name, m in module.named_modules() if m not in self.names})
            for t in (*module.parameters(), *module.buffers()):
                for part in (t,) if t.layout is torch.strided else _dense_parts(t):
                    self.excluded.add(part.untyped_storage()._cdata)
        self.stack.append(module)
        self._note()

    def leave(self, module: nn.Module, *_: Any) -> None:
        while self.stack and self.stack.pop() is not module:
            pass
        self._note()

    def _note(self) -> None:
        self.changes.append((torch._C._autograd._get_sequence_nr(), self.stack[-1] if self.stack else None))

    def module_at(self, sequence: int) -> str:
        found: nn.Module | None = None
        for start, module in self.changes:  # a few hundred entries, walked in order
            if start > sequence:
                break
            found = module
        return "" if found is None else self.names.get(found, type(found).__name__)


@contextmanager
def _modules_run() -> Iterator[_Runs]:
    runs = _Runs()
    handles = [
        module_hooks.register_module_forward_pre_hook(runs.enter),
        module_hooks.register_module_forward_hook(runs.leave, always_call=True),
    ]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


# ---- what a node holds ----


def _weigh(roots: list[Tensor], runs: _Runs) -> tuple[Held, ...]:
    seen: set[int] = {_PARAMETER, *runs.excluded}
    held = []
    for node in sorted(_nodes(roots), key=lambda n: n._sequence_nr()):
        module = runs.module_at(node._sequence_nr())
        for name, thing in _held_by(node):
            for leaf in _reachable(thing, []):
                key, nbytes = _storage(leaf)
                if key not in seen:
                    seen.add(key)
                    shape = tuple(leaf.shape) if isinstance(leaf, (Tensor, np.ndarray)) else (len(leaf),)
                    dtype = str(getattr(leaf, "dtype", "bytes")).removeprefix("torch.")
                    device = str(getattr(leaf, "device", "cpu"))
                    held.append(Held(module, node.name(), name, shape, dtype, device, nbytes))
    return tuple(sorted(held, key=lambda h: -h.nbytes))


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


def _nodes(roots: list[Tensor]) -> list[Any]:
    """Every node of the graph, and of the histories of tensors that nodes hold."""
    found: dict[int, Any] = {}
    queue = deque(t.grad_fn for t in roots)
    while queue:
        node = queue.popleft()
        if node is None or id(node) in found:
            continue
        found[id(node)] = node
        queue.extend(child for child, _ in node.next_functions)
        extra: list[Any] = []
        for _, thing in _held_by(node):
            for _leaf in _reachable(thing, extra):
                pass
        queue.extend(extra)
    return list(found.values())


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


_OPAQUE = (
    nn.Module,
    Controller,
    type,
    types.ModuleType,
    str,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
)


def _reachable(thing: Any, nodes: list[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors, arrays and bytes inside an object; autograd nodes met on the way are appended to ``nodes``."""
    seen = set() if seen is None else seen
    if (isinstance(thing, _OPAQUE) and not isinstance(thing, nn.Parameter)) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor) and thing.layout is not torch.strided:
        yield from _dense_parts(thing)
        return
    if isinstance(thing, (Tensor, np.ndarray, bytes, bytearray)):
        yield thing
        if isinstance(thing, Tensor) and thing.grad_fn is not None:
            nodes.append(thing.grad_fn)  # a held tensor keeps its own history alive
        return
    if isinstance(thing, torch.autograd.graph.Node):
        nodes.append(thing)
        return
    for part in _parts(thing):
        yield from _reachable(part, nodes, seen)


def _dense_parts(sparse: Tensor) -> tuple[Tensor, ...]:
    """Values and indices of a sparse tensor, which has no storage of its own."""
    if sparse.layout is torch.sparse_coo:
        return sparse._values(), sparse._indices()
    rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (sparse.crow_indices(), sparse.col_indices()) if rows else (sparse.ccol_indices(), sparse.row_indices())
    return sparse.values(), *indices


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
