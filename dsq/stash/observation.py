"""The bytes of a model's stash, for loggers: the policies' counts, or the converted layers weighed in one forward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsq.quantizers import Quantised
from dsq.stash.controller import applied
from dsq.stash.memory import parameter_storages
from dsq.stash.meter import GraphMeter


class Observation:
    """The first training forward of each converted layer after ``begin``, weighed right after it.

    A tensor that several layers keep counts once. Then the layers run without hooks again.
    """

    paused = False  #: whether forwards pass unseen

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._before_that: dict[str, float] = {}
        self._seen = False
        self.begin()

    def begin(self) -> None:
        """Look again; until then ``metrics`` tells what was seen before."""
        self._before_that = self.metrics()
        self._meter, self._seen = GraphMeter(), False
        if applied(self.model):
            return
        for layer in self.model.modules():
            if isinstance(layer, Quantised) and layer not in self._handles:  # hooks that wait stay: others compile anew
                self._handles[layer] = layer.register_forward_hook(self._after, with_kwargs=True)

    def metrics(self) -> dict[str, float]:
        """Return "stash_mib", the MiB kept between forward and backward: by the model's stash policies, as they report
        them; without one by the converted layers, once they were seen. A compiled graph gives no figure."""
        if policies := applied(self.model).values():
            kept = sum(policy.report().kept_bytes for policy in policies)
            return {"stash_mib": kept / 2**20} if kept else {}
        if not self._seen:
            return self._before_that
        return {"stash_mib": sum(held.nbytes for held in self._meter.held) / 2**20}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: the hooks that the layers of a copied or saved model carry along do nothing."""
        return {"model": self.model, "_before_that": self.metrics(), "_handles": {}, "_seen": False}

    def _after(self, layer: Any, args: Any, kwargs: Any, output: Any = None) -> None:
        if output is None:  # a copy's old hook ran, and took this one's handle away
            return
        if torch.compiler.is_compiling() or self.paused or layer not in self._handles:  # a graph is not looked into
            return
        y = output[0] if isinstance(output, tuple) else output
        plain = not isinstance(layer, Quantised)  # as dsq.report runs it too, or after dsq.unconvert
        if plain or y.grad_fn is None or not layer.training:
            return
        self._seen = True
        self._meter.ignore(parameter_storages(layer))  # now: fully_shard gathers weights for the forward
        made = [x.grad_fn for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        newest = max((node._sequence_nr() for node in made if node is not None), default=-1)
        self._meter.add([y], newest + 1)  # the nodes that were made since its inputs
        self._handles.pop(layer).remove()
