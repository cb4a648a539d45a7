"""What mesa keeps between steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dsq.stash.controller import Controller, Summary, check_keys, check_parameters, parameter_shapes
from dsq.stash.mesa.in_graphs import graphs_ask
from dsq.stash.mesa.observed_forward import OPERATIONS, ObservedForward
from dsq.stash.mesa.running_modules import RunningModules
from dsq.stash.mesa.running_ranges import RunningRanges
from dsq.stash.saved_tensors.compiled_graphs.blocks import note_of_graphs
from dsq.stash.saved_tensors.forms import get
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.storages import parameter_storages


class Mesa(Controller):
    """Running ranges, and the latest forward's bytes."""

    def __init__(self, model: nn.Module, kinds: frozenset[str], ranges: RunningRanges, groups: int | None) -> None:
        super().__init__(model)
        self.kinds, self.ranges = kinds, ranges
        self.running = RunningModules(self, model, groups)
        self.latest: ForwardStash | None = None

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward."""
        observed = ObservedForward(self.kinds, self.ranges, self.running, parameter_storages(self.model))
        self.latest = observed.stash
        with graphs_ask(observed), saved_tensors_hooks(observed.pack, get), observed:
            yield

    def report(self) -> Summary:
        kinds = f"8 bits: {', '.join(k for k in OPERATIONS if k in self.kinds)}"
        if self.latest is None:
            return Summary(self.name, (), 0, 0, (kinds,))
        details = kinds, *note_of_graphs(self.model, self.latest)
        return Summary(self.name, (), self.latest.raw_bytes, self.latest.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        ranges = {key: value.clone() for key, value in self.ranges.alpha_beta.items()}
        return {"parameters": parameter_shapes(self.model), "ranges": ranges, "count": self.ranges.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("parameters", "ranges", "count"))
        check_parameters(self.name, self.model, state["parameters"])
        self.ranges.alpha_beta = {key: value.clone() for key, value in state["ranges"].items()}
        self.ranges.count = state["count"]
