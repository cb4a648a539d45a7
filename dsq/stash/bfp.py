"""DSQ's stash for every saved tensor (DSQ, section 3, beyond the GEMM inputs): block floating point at q1.

Boxes run over 16 values that are neighbours in memory, so all views of a tensor share one code: 4.5 bits a value at
q1 = 4, 2.5 at 2. Exact stay: weights; masks of ReLU and dropout, in one bit; indices of max-pool, in the narrowest
integer; statistics (mean and 1/std of norms, attention's logsumexp); what a loss inside the model keeps, and tensors of
few values. The uint8 codes of a dsq.Linear or of another policy are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from dsq.arguments import whole_number
from dsq.formats import BFP, Format
from dsq.linear import Linear
from dsq.packing import Packed, Rounding, pack
from dsq.scheduler import PrecisionScheduler
from dsq.stash.bit_rules import FEW_BITS
from dsq.stash.calls import Rule, Rules
from dsq.stash.forward_stash import ForwardStash, storages_of
from dsq.stash.hooks import around_forward, get, parameter_storages
from dsq.stash.policy import Controller, Summary, check_keys, register
from dsq.stash.saved import MemoryOrder

FEW = 256  #: values up to which a tensor is kept exact


@register("bfp", composes_with=("selective", "wtacrs", "checkpoint"))
def attach(
    model: nn.Module,
    *,
    bits: int | None = None,
    box: int = 16,
    rounding: Rounding = "nearest",
    seed: int = 0,
    scheduler: PrecisionScheduler | None = None,
) -> Controller:
    """Pack the model's saved tensors at q1.

    Args:
        bits: q1, 2 to 16; above, up to 32, tensors stay as they are. None: the q1 of the scheduler; without one, that
            of the model's dsq.Linear layers, whatever level they are at; without any, 4.
        box: values that share an exponent.
        rounding: nearest or stochastic; seed: of stochastic rounding, with the step and the tensor's turn mixed in.
        scheduler: a dsq.PrecisionScheduler whose level the stash follows.
    Raises:
        ValueError: an option out of range, bits and scheduler both given.
    """
    if bits is not None and scheduler is not None:
        raise ValueError(f"bits={bits!r} and scheduler were both given: the scheduler says the bits")
    if scheduler is not None and not isinstance(scheduler, PrecisionScheduler):
        raise ValueError(f"scheduler must be None or a dsq.PrecisionScheduler, got {scheduler!r}")
    BFP(4 if bits is None else bits, box)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be nearest or stochastic, got {rounding!r}")
    controller = Bfp(model, bits, box, rounding, whole_number("seed", seed), scheduler)
    around_forward(controller, model, controller.context)
    before = model.register_forward_pre_hook(lambda *call: controller.before(*call), prepend=True, with_kwargs=True)
    controller.undo.callback(before.remove)
    return controller


class Bfp(Controller):
    """The format now, the count of forwards (it seeds stochastic rounding), and the latest forward's bytes."""

    def __init__(
        self,
        model: nn.Module,
        bits: int | None,
        box: int,
        rounding: Rounding,
        seed: int,
        scheduler: PrecisionScheduler | None,
    ) -> None:
        super().__init__(model)
        self.bits, self.box, self.rounding, self.seed, self.scheduler = bits, box, rounding, seed, scheduler
        self.forwards = 0
        self.batch: set[int] = set()
        self.latest: tuple[ForwardStash, Format] | None = None

    @property
    def format(self) -> Format:
        """What a forward started now would pack with."""
        if self.bits is not None:
            return BFP(self.bits, self.box)
        if self.scheduler is not None:
            return BFP(self.scheduler.precision.q1, self.box)
        for module in self.model.modules():
            if isinstance(module, Linear):
                return module.quantizers.q1
        return BFP(4, self.box)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the model's inputs: they are saved, and packed, though they need no gradient."""
        self.batch = storages_of((args, kwargs))

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward, and around a recomputation in the backward."""
        self.forwards += 1
        encode = Encode(self.format, self.rounding, (self.seed << 20) + self.forwards)
        stash = ForwardStash(encode, parameter_storages(self.model), self.batch)
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.latest = stash, encode.format
        with saved_tensors_hooks(stash.pack, get), Rules(_rules(stash), stash.form, stash.note_call):
            yield

    def report(self) -> Summary:
        """Bytes of the latest training forward (a ReLU's mask adds to what is kept only), and its format."""
        if self.latest is None:
            return Summary(self.name)
        stash, fmt = self.latest
        return Summary(self.name, (), stash.raw_bytes, stash.kept_bytes, (f"format {fmt}",))

    def state_dict(self) -> dict[str, Any]:
        """The count of forwards: it seeds stochastic rounding."""
        return {"forwards": self.forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("forwards",))
        self.forwards = state["forwards"]


class Encode:
    """The encoder of one forward: dsq.pack over neighbours in memory, a seed a tensor."""

    def __init__(self, fmt: Format, rounding: Rounding, seed: int) -> None:
        self.format, self.rounding, self.seed = fmt, rounding, seed
        self.turn = 0

    def __call__(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> Packed | None:
        if values.numel() <= FEW or self.format.grid is None:
            return None
        self.turn += 1
        return pack(values.reshape(-1), self.format, rounding=self.rounding, seed=(self.seed << 16) + self.turn)


#: what these keep is small, or is what a gradient is most sensitive to (GACT, section 6.1: a loss)
_SENSITIVE: tuple[Any, ...] = (
    *(torch.rsqrt, Tensor.rsqrt, torch.logsumexp, Tensor.logsumexp),
    *(F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
)


def _rules(stash: ForwardStash) -> dict[Any, Rule]:
    exact: Rule = lambda call: stash.keep  # noqa: E731
    return FEW_BITS | dict.fromkeys(_SENSITIVE, exact)
