"""What the converted layers of a model keep, and how far it is from what they were given, for loggers and records."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from dsq.ops.linear_passes import matrix
from dsq.packing import quantize
from dsq.quantizers import Quantised
from dsq.stash.controller import applied
from dsq.stash.memory import parameter_storages, weak
from dsq.stash.meter import GraphMeter


class Observation:
    """Training forwards of the converted layers, each weighed right after it; a tensor that several keep counts once.

    once: the first forward of each layer after ``begin`` alone, and with the error of its stash; then the layers run
        without hooks again. Else all forwards until ``end``.
    nbytes: bytes that the layers keep; input_bytes: those of their inputs in float32, which plain layers would keep;
        layers: how many were seen.
    """

    paused = False  #: whether forwards pass unseen

    def __init__(self, model: nn.Module, once: bool = True) -> None:
        self.model, self.once = model, once
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._seen: set[nn.Module] = set()
        self._before_that: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Look again; until then ``metrics`` tells what was seen before."""
        self._before_that = self.metrics()
        self._meter = GraphMeter(set())
        self._inputs: dict[tuple[int, int, int], StorageWeakRef] = {}  #: by where they lie, which no other may take
        self._seen, self._squares, self._errors = set(), 0.0, 0.0
        for layer in self.model.modules():
            if isinstance(layer, Quantised) and layer not in self._handles:  # hooks that wait stay: others compile anew
                self._handles[layer] = layer.register_forward_hook(self._after, with_kwargs=True)

    def end(self) -> None:
        """See no more forwards."""
        for layer in list(self._handles):
            self._remove(layer)

    @property
    def layers(self) -> int:
        return len(self._seen)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._meter.held)

    @property
    def input_bytes(self) -> int:
        return sum(4 * count for _, _, count in self._inputs)

    def metrics(self) -> dict[str, float]:
        """Return the latest figures by name; none before the first forward.

        stash_mib: MiB that the layers keep, a tensor that several read once. stash_error: |Q1(x) - x| / |x| over all
        their inputs. POLICY_mib: what each stash policy of the model reports.
        """
        if not self._seen:
            return self._before_that
        error = (self._errors / self._squares) ** 0.5 if self._squares else 0.0
        reports = {f"{name}_mib": it.report().kept_bytes / 2**20 for name, it in applied(self.model).items()}
        return {"stash_mib": self.nbytes / 2**20, "stash_error": error, **reports}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: the hooks that the layers of a copied or saved model carry along do nothing."""
        kept = {"model": self.model, "once": self.once, "_before_that": self.metrics()}
        return {**kept, "_handles": {}, "_seen": set()}

    @torch.no_grad()
    def _after(self, layer: Any, args: Any, kwargs: Any, output: Any = None) -> None:
        if output is None:  # a copy's old hook ran, and took this one's handle away
            return
        if torch.compiler.is_compiling() or self.paused or layer not in self._handles:  # a graph is not looked into
            return
        y = output[0] if isinstance(output, tuple) else output
        plain = not isinstance(layer, Quantised)  # as dsq.report runs it too, or after dsq.unconvert
        if plain or y.grad_fn is None or (self.once and not layer.training):
            return
        self._seen.add(layer)
        self._meter.ignore(parameter_storages(layer))  # now: fully_shard gathers weights for the forward
        inputs: list[Any] = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        before = [x.grad_fn._sequence_nr() for x in inputs if x.grad_fn is not None]
        self._meter.add([y], max(before, default=-1) + 1)  # the nodes that were made since its inputs
        if inputs:
            x = inputs[0].to_local() if hasattr(inputs[0], "to_local") else inputs[0]  # of a DTensor, this rank's
            storage = weak(x)
            self._inputs[storage.cdata, int(x.storage_offset()), x.numel()] = storage
            if self.once:
                stash, x_TK = layer.quantizers.matmuls.stash, matrix(x).float()
                rounded = x_TK if stash.format is None else quantize(x_TK, stash.format, stash.axis)
                self._squares += float(x_TK.square().sum())
                self._errors += float((rounded - x_TK).square().sum())
        if self.once:
            self._remove(layer)

    def _remove(self, layer: nn.Module) -> None:
        if layer in self._handles:
            self._handles.pop(layer).remove()
