"""What the converted layers of a model stash in training, and how far it is from what they were given."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsq.ops.linear_passes import matrix
from dsq.packing import quantize
from dsq.quantizers import Quantised
from dsq.stash.meter.graph import GraphMeter
from dsq.stash.meter.module_runs import next_node
from dsq.stash.policy import applied
from dsq.stash.storages import parameter_storages


class Observation:
    """The first training forward of each converted layer after ``begin``; then the layers run without hooks again."""

    paused = False  #: whether forwards pass unseen

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handles: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}
        self._seen = 0
        self._before_that: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Look again; until then ``metrics`` tells what was seen before."""
        self._before_that = self.metrics()
        self._meter = GraphMeter(set())
        self._first_node: dict[nn.Module, int] = {}
        self._seen, self._squares, self._errors = 0, 0.0, 0.0
        for layer in self.model.modules():
            if not isinstance(layer, Quantised) or layer in self._handles:
                continue  # compiled code is made again for other hooks: those that wait stay
            self._handles[layer] = (
                layer.register_forward_pre_hook(self._before),
                layer.register_forward_hook(self._after),
            )

    def metrics(self) -> dict[str, float]:
        """The latest figures by name; none before the first forward.

        stash_mib: MiB that the layers keep, a tensor that several read once. stash_error: |Q1(x) - x| / |x| over all
        their inputs. POLICY_mib: what each stash policy of the model reports.
        """
        if not self._seen:
            return self._before_that
        found = {"stash_mib": sum(held.nbytes for held in self._meter.held) / 2**20}
        found["stash_error"] = (self._errors / self._squares) ** 0.5 if self._squares else 0.0
        for name, controller in applied(self.model).items():
            found[f"{name}_mib"] = controller.report().kept_bytes / 2**20
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: the hooks that the layers of a copied or saved model carry along do nothing."""
        return {"model": self.model, "_handles": {}, "_seen": 0, "_before_that": self.metrics()}

    def _before(self, layer: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a graph is not looked into
        if layer in self._handles and not self.paused:
            self._first_node[layer] = next_node()

    def _after(self, layer: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        y = output[0] if isinstance(output, tuple) else output
        plain = not isinstance(layer, Quantised)  # as dsq.report runs it too, or after dsq.unconvert
        if self.paused or plain or layer not in self._handles or y.grad_fn is None or not layer.training:
            return
        self._remove(layer)
        self._seen += 1
        self._meter.ignore(parameter_storages(layer))  # now: fully_shard gathers weights for the forward
        self._meter.add([y], self._first_node[layer])
        if args and isinstance(args[0], Tensor):
            with torch.no_grad():
                stash = layer.quantizers.matmuls.stash
                x = args[0].to_local() if hasattr(args[0], "to_local") else args[0]  # of a DTensor, this rank's
                x_TK = matrix(x).float()
                rounded = x_TK if stash.format is None else quantize(x_TK, stash.format, stash.axis)
                self._squares += float(x_TK.square().sum())
                self._errors += float((rounded - x_TK).square().sum())

    def _remove(self, *layers: nn.Module) -> None:
        for layer in layers:
            for handle in self._handles.pop(layer):
                handle.remove()
