"""What bfp keeps between steps, and its encoder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsq.arguments import whole_number
from dsq.formats import DEFAULT, Format, named
from dsq.linear import Quantised
from dsq.packing import Packed, Rounding, pack
from dsq.scheduler import PrecisionScheduler
from dsq.stash.bfp.in_graphs import BoxesInGraphs
from dsq.stash.controller import Controller, Summary, check_keys
from dsq.stash.saved_tensors.compiled_graphs.blocks import note_of_graphs
from dsq.stash.saved_tensors.forms import get
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.hooks import in_backward
from dsq.stash.saved_tensors.memory_order import MemoryOrder
from dsq.stash.saved_tensors.rules.few_bits import FEW_BITS, SENSITIVE
from dsq.stash.saved_tensors.rules.function_mode import Rules
from dsq.stash.saved_tensors.rules.singular import whole
from dsq.stash.saved_tensors.storages import parameter_storages, storages_of

FEW = 256  #: values up to which a tensor is kept exact
_RULES = FEW_BITS | dict.fromkeys(SENSITIVE, whole)
#: bits of what no linear layer reads, whatever its q1: with 3 the generated corpus lost 2 BLEU, with 4 none
LEAST = 4


class Bfp(Controller):
    """The format now, the count of forwards (it seeds stochastic rounding), and the latest forward's bytes."""

    def __init__(
        self,
        model: nn.Module,
        bits: int | None,
        format_name: str | None,
        box: int | None,
        rounding: Rounding,
        seed: int,
        scheduler: PrecisionScheduler | None,
    ) -> None:
        super().__init__(model)
        self.bits, self.format_name, self.box = bits, format_name, box
        self.rounding, self.seed, self.scheduler = rounding, seed, scheduler
        self.forwards = 0
        self.batch: set[int] = set()
        self.latest: tuple[ForwardStash, Format] | None = None

    def format_now(self) -> Format:
        """What a forward started now would pack with: as told, else as the linear layers have it, else the default.

        Raises ValueError for a box that no format has, or that this one has not.
        """
        bits = self.bits
        if bits is None and self.scheduler is not None:
            bits = self.scheduler.precision.q1
        q1 = None
        if bits is None or self.format_name is None:  # the search takes time, and a forward asks each time
            layers = (module for module in self.model.modules() if isinstance(module, Quantised))
            q1 = next((layer.quantizers.q1 for layer in layers), None)
        if bits is None:
            bits = LEAST if q1 is None else max(LEAST, q1.bits)
        if q1 is not None and self.format_name is None and self.box is None:
            return q1.at(bits)
        name = self.format_name
        if name is None:
            name = DEFAULT if q1 is None else q1.name
        return named(name, bits, **({} if self.box is None else {"box": self.box}))

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the model's inputs: they are saved, and packed, though they need no gradient."""
        self.batch = storages_of((args, kwargs))

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward, and around a recomputation in the backward."""
        self.forwards += 1
        fmt, seed, turns = self.format_now(), (self.seed << 20) + self.forwards, count(1)

        def encode(tensor: Tensor, order: MemoryOrder, values: Tensor) -> Packed | None:
            if values.numel() <= FEW or not fmt.packs:
                return None
            return pack(values.reshape(-1), fmt, rounding=self.rounding, seed=(seed << 16) + next(turns))

        in_graphs = BoxesInGraphs(str(fmt), FEW) if self.rounding == "nearest" and fmt.packs else None
        stash = ForwardStash(encode, parameter_storages(self.model), self.batch, in_graphs)
        if not in_backward():  # where it is a recomputation
            self.latest = stash, fmt
        with saved_tensors_hooks(stash.pack, get), Rules(_RULES, stash.pack_by_rule, stash.note_call):
            yield

    def report(self) -> Summary:
        """Bytes of the latest training forward (a ReLU's mask adds to what is kept only), and its format."""
        if self.latest is None:
            return Summary(self.name)
        stash, fmt = self.latest
        details = f"format {fmt}", *note_of_graphs(self.model, stash)
        return Summary(self.name, (), stash.raw_bytes, stash.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        """The count of forwards: it seeds stochastic rounding."""
        return {"forwards": self.forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("forwards",))
        self.forwards = whole_number("forwards", state["forwards"], 0)
