"""DSQ's stash for every operation of the table (DSQ, section 3, beyond the GEMM inputs): a number format at q1.

The policy has the name of the paper's format, block floating point. Boxes run over 16 values that are neighbours in
memory, so all views of a tensor share one code: 4.5 bits a value at q1 = 4. The table's rows say which operations keep
more bits than q1. What has no row is as PyTorch keeps it (dsq/stash/table).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dsq.arguments import choice, whole_number
from dsq.formats import DEFAULT, FORMATS, NARROWEST, WIDEST, Format, named
from dsq.kernels.dispatch import pack, unpack
from dsq.packing import Rounding
from dsq.quantizers import Quantised
from dsq.scheduler import PrecisionScheduler
from dsq.stash.codes import Decode, Kept, What
from dsq.stash.controller import Controller, check_keys
from dsq.stash.interception import TablePolicy, intercept
from dsq.stash.memory_order import MemoryOrder
from dsq.stash.policy import register
from dsq.stash.table.bits import MORE

#: bits of what no linear layer reads, whatever its q1: with 3 the generated corpus lost 2 BLEU, with 4 none
LEAST = 4
_MOST = 16  #: the widest code


@register("bfp", composes_with=("selective", "wtacrs", "checkpoint"), compiled="model")
def attach(
    model: nn.Module,
    *,
    bits: int | None = None,
    format: str | None = None,
    box: int | None = None,
    rounding: Rounding = "nearest",
    seed: int = 0,
    scheduler: PrecisionScheduler | None = None,
) -> Controller:
    """Pack what the table lets it at q1.

    Args:
        bits: q1, 2 to 16; above, up to 32, tensors stay as they are. None: the q1 of the scheduler; without one, that
            of the model's dsq.Linear layers, whatever level they are at, but no less than 4; without any, 4.
        format: a name of dsq.formats.FORMATS, "bfp" the paper's. None: the format of the model's dsq.Linear layers at
            q1; without any, snvint, which loses least (docs/formats.md). Wider codes than it is useful to are bfp's.
        box: values that share a scale. None: as in the layers, where their format is taken, else 16.
        rounding: nearest or stochastic; seed: of stochastic rounding, with the step and the tensor's turn mixed in.
        scheduler: a dsq.PrecisionScheduler whose level the stash follows.
    Raises:
        ValueError: an option out of range, bits and scheduler both given.
    """
    if bits is not None and scheduler is not None:
        raise ValueError(f"bits={bits!r} and scheduler were both given: the scheduler says the bits")
    if scheduler is not None and not isinstance(scheduler, PrecisionScheduler):
        raise ValueError(f"scheduler must be None or a dsq.PrecisionScheduler, got {scheduler!r}")
    if bits is not None:
        bits = whole_number("bits", bits, NARROWEST, WIDEST)
    if format is not None:
        choice("format", format, FORMATS)
    choice("rounding", rounding, get_args(Rounding))
    controller = Bfp(model, bits, format, box, rounding, whole_number("seed", seed), scheduler)
    controller.format_now()  # refuses a box that the format has not
    intercept(controller, model)
    return controller


class Bfp(TablePolicy):
    """The format now, and the count of forwards: it seeds stochastic rounding."""

    more: Mapping[What, int] = MORE  #: bits over q1, by what is kept

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

    def codec(self, module: nn.Module) -> "BoxCodec":
        self.forwards += 1
        self._format = self.format_now()
        seed = None if self.rounding == "nearest" else (self.seed << 36) + (self.forwards << 16)
        return BoxCodec(self._format, seed, self.more)

    def traced_codec(self) -> "BoxCodec | None":
        return None if self.rounding == "stochastic" else BoxCodec(self.format_now(), None, self.more)

    def details(self) -> tuple[str, ...]:
        return (f"format {self._format}",)

    def state_dict(self) -> dict[str, Any]:
        """The count of forwards: it seeds stochastic rounding."""
        return {"forwards": self.forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("forwards",))
        self.forwards = whole_number("forwards", state["forwards"], 0)


class BoxCodec:
    """Codes in boxes of neighbours; ``seed`` None rounds to nearest."""

    def __init__(self, fmt: Format, seed: int | None, more: Mapping[What, int] = MORE) -> None:
        formats = _formats.__wrapped__ if torch.compiler.is_compiling() else _formats  # a graph calls no cache
        self.formats, self.texts = formats(fmt, tuple(more.items()))
        self.packs, self.seed, self.turns = fmt.packs, seed, count(1)

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> tuple[tuple[Tensor, ...], Decode] | None:
        if not self.packs:
            return None
        if torch.compiler.is_compiling():
            return self._encode_traced(values, kept)
        fmt = self.formats[kept.what]
        seed = None if self.seed is None else self.seed + next(self.turns)
        codes = pack(values.reshape(-1), fmt, 0, seed)
        return codes, _Unpack(fmt, (values.numel(),))

    def _encode_traced(self, values: Tensor, kept: Kept) -> tuple[tuple[Tensor, ...], Decode]:
        text, sizes = self.texts[kept.what], (values.numel(),)
        seed = None if self.seed is None else torch.randint(2**62, (), device="cpu").item()
        codes = torch.ops.dsq.pack(values.reshape(-1), text, 0, seed)
        return codes, lambda saved, dtype: torch.ops.dsq.unpack(*saved, text, sizes, 0, dtype)


@dataclass(eq=False, slots=True)
class _Unpack:
    fmt: Format
    sizes: tuple[int, ...]

    def __call__(self, codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return unpack(codes[0], codes[1], self.fmt, self.sizes, 0, dtype)


@lru_cache(maxsize=64)  # asked for in each forward
def _formats(fmt: Format, more: tuple[tuple[What, int], ...]) -> tuple[dict[What, Format], dict[What, str]]:
    """The format of each thing that is kept, and its text, as operators take it: compilers cannot make a text."""
    wider = dict(more)
    formats = {what: _wider(fmt, wider.get(what, 0)) for what in get_args(What)}
    return formats, {what: str(format) for what, format in formats.items()}


def _wider(fmt: Format, more: int) -> Format:
    return fmt.at(min(fmt.bits + more, _MOST)) if fmt.packs else fmt
