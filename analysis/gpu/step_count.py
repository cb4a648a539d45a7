"""The work and the peak memory of a training step on an H100 that is not there (traced.py)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from analysis import models
from analysis.gpu import Machine, llama
from analysis.gpu.designs import Design
from analysis.gpu.launches import Counted
from analysis.gpu.traced import FakeDevice, TracedGraph, Work, fake_h100, flash_attention
from analysis.gpu.training import Size, Step
from dsq.kernels import dispatch
from dsq.kernels.triton import gemm
from dsq.kernels.triton.backend import TRITON
from dsq.stash import interception
from dsq.stash.rules import attention


class StepCount(Counted):
    """The work inside, and the bytes of the storages that are alive."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device, self.work, self.peak_bytes = device, Work(), 0
        self.calls: list[tuple[TracedGraph, int]] = []  #: the graphs that ran, with the bytes alive before
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else PyTorch runs no compiled code under a dispatch mode

    def __enter__(self) -> "StepCount":
        self.device.before_call, self.work = self._begin, Work()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a tensor's device: most calls
            return func(*args, **kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.hold(out)
        return out

    def note(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Add an operation's work; that of a graph is added as a whole."""
        if not self.device.in_graph:
            self.work += Work.of(name, inputs, outputs)

    def hold(self, tensors: Any) -> None:
        """Count the storages of ``tensors``, a tree, from now on until they are freed."""
        storages = [x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor)]
        new = {x._cdata: (StorageWeakRef(x), x.nbytes()) for x in storages if not self._is_counted(x)}
        if new:
            self._storages |= new
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())

    def live_bytes(self) -> int:
        """Return the bytes of the counted storages that are alive."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def _is_counted(self, storage: torch.UntypedStorage) -> bool:
        entry = self._storages.get(storage._cdata)
        return entry is not None and not entry[0].expired()  # the address may be that of one before

    def _begin(self, graph: TracedGraph) -> None:
        self.work += graph.work
        self.calls.append((graph, self.live_bytes()))


def count_step(size: Size, design: Design) -> StepCount:
    """Return the count of a warm step: forward, backward and update. Needs ``traced.environment``."""
    with fake_h100() as device, _fake_operations(device, "all" in design.setup) as count, design.options():
        step = Step(Machine("H100", torch.device("cuda")), design.setup, size)
        step()
        parameters = list(step.model.parameters())
        with count:
            count.hold([parameters, list(step.model.buffers()), step.tokens])
            count.hold([step.optimizer.state[parameter] for parameter in parameters])
            step()
    return count


@contextmanager
def _fake_operations(device: FakeDevice, eager_stash: bool) -> Iterator[StepCount]:
    """Inside, PyTorch's operations and dsq's kernels run on fake tensors; yield the count, which is to be entered."""
    count = StepCount(device)

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        count.note(kernel.fn.__name__, [x for x in args if isinstance(x, Tensor)], [])

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:  # for which PyTorch has no rule for fake tensors
        y = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
        count.note("mm", [a, b], [y])
        return y

    functions = SimpleNamespace(**vars(F) | {"scaled_dot_product_attention": flash_attention})
    # an eager stash finds its rule by PyTorch's function, which stays as it is; the rule calls the other
    callers: list[Any] = [attention] if eager_stash else [models, llama]
    changes: list[tuple[Any, str, Any]] = [(module, "F", functions) for module in callers]
    changes += [
        (JITFunction, "run", note),
        (gemm, "torch", SimpleNamespace(**vars(torch) | {"mm": mm})),
        (dispatch, "_dispatch_modes", int),  # kernels are called past the dispatcher, as on a GPU
        (dispatch, "_TENSORS", (*dispatch._TENSORS, FakeTensor)),
        (interception, "_TENSORS", (*interception._TENSORS, FakeTensor)),
        (attention, "_saves_copies", lambda *_: False),  # it asks the device for its kernels of attention
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(dispatch.use_backend(replace(TRITON), "cuda"))
        stack.enter_context(FakeTensorMode())
        yield count
