"""What a forward keeps for its backward, measured and as a report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsq.stash.meter.graph import GraphMeter, Held, reachable
from dsq.stash.meter.live_tensors import StoragesBefore, hidden_leaves
from dsq.stash.meter.module_runs import modules_run
from dsq.stash.meter.peak import peak


@dataclass(frozen=True)
class Report:
    """What `measure` found."""

    held: tuple[Held, ...]  #: largest first
    peak_bytes: int  #: most that PyTorch's allocators held at once, above what they held before; files mapped then too

    @property
    def nbytes(self) -> int:
        """Bytes that allocators hold for the backward."""
        return sum(h.nbytes for h in self.held if h.device != "file")

    @property
    def file_bytes(self) -> int:
        """Bytes kept for the backward in files."""
        return sum(h.nbytes for h in self.held if h.device == "file")

    def by(self, field: str) -> dict[str, int]:
        """Bytes by "module", "op", "dtype" or "device", largest first."""
        sums: dict[str, int] = {}
        for h in self.held:
            key = str(getattr(h, field))
            sums[key] = sums.get(key, 0) + h.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        files = f", {_mib(self.file_bytes)} MiB in files" if self.file_bytes else ""
        lines = [f"{_mib(self.nbytes)} MiB kept for the backward{files}, {_mib(self.peak_bytes)} MiB at the peak"]
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
        Report. Bytes are those at the end of the forward; tensors that were there before it (weights, the caller's
        batch) are not among them. The peak is exact for tensors (CUDA: the caching allocator's
        counters; CPU: the allocation events of PyTorch's profiler); scratch that a library allocates by itself is not
        seen, and neither are sparse tensors.
    Raises:
        TypeError: ``fn`` cannot be called. ValueError: nothing it returned needs a gradient.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
    before = StoragesBefore()
    with modules_run() as runs, peak() as most:
        result = fn()
        roots = [t for t in reachable(result, []) if isinstance(t, Tensor) and t.grad_fn is not None]
        if not roots:
            raise ValueError("fn must return a tensor that needs a gradient (is it under no_grad, or all frozen?)")
        meter = GraphMeter(runs.weights | before.storages, runs.module_at)
        meter.add(roots)
        meter.add_hidden(hidden_leaves(before))
        if backward:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return Report(tuple(sorted(meter.held, key=lambda held: -held.nbytes)), most.nbytes)
