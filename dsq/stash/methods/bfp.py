"""DSQ's stash for every operation that has a rule (DSQ, section 3, beyond the GEMM inputs): a number format at q1.

The policy has the name of the paper's format, block floating point. Blocks run over 16 values that are neighbors in
memory, so all views of a tensor share one code: 4.5 bits a value at q1 = 4. Operations without a rule (dsq/stash/rules)
save their tensors as PyTorch does.

Some operations get more bits than q1 (EXTRA_BITS), by the error of the whole gradient (docs/stash-policies.md): few
bits hurt attention most, the more the longer a model has trained; a norm's x^ serves the linear layer behind it too.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dsq.arguments import choice
from dsq.formats import DEFAULT, FORMATS, MAX_PACKED_BITS, Format, named
from dsq.stash.controller import Controller, compiled_blocks
from dsq.stash.interception import RulePolicy, has_partitioner, note_graph
from dsq.stash.memory import MemoryOrder
from dsq.stash.policy import register
from dsq.stash.saved_forms import Encoded, encode_blocks
from dsq.stash_bits import EXTRA_BITS, GRAPH_EXTRA_BITS, MAX_GRAPH_BITS, MIN_BITS, Role


@register("bfp", composes_with=("selective", "wtacrs", "checkpoint"), compiles=True)
def attach(
    model: nn.Module,
    *,
    bits: int | None = None,
    format: str | None = None,
    block_size: int | None = None,
) -> Controller:
    """Pack what the table lets it at q1.

    Args:
        bits: q1, 2 to 16; above, up to 32, tensors stay as they are. None: that of the model's dsq.Linear layers,
            whatever level they are at, but no less than 4; without any, 4.
        format: a name of dsq.formats.FORMATS, "bfp" the paper's. None: the format of the model's dsq.Linear layers at
            q1; without any, snvint, which loses least (docs/formats.md). Wider codes than it is useful to are bfp's.
        block_size: values that share a scale. None: as in the layers, where their format is taken, else 16.
    Raises:
        ValueError: an option out of range.
    """
    if format is not None:
        choice("format", format, FORMATS)
    controller = Bfp(model, bits, format, block_size)
    controller.format_now()  # refuses bits out of range, and a block that the format has not
    return controller


#: attribute of a model that dsq.convert found no layers in: q1 at its level
STASH_FORMAT = "_dsq_q1"


class Bfp(RulePolicy):
    """Codes in one format, that of the model's level or of the policy's options."""

    partitioner: Any = None  #: the latest of dsq.inductor_options, for the model or a copy of it

    def __init__(self, model: nn.Module, *options: Any) -> None:
        super().__init__(model)
        self.bits, self.format_name, self.block_size = options

    def format_now(self, module: nn.Module | None = None) -> Format:
        """Return the format of a forward of ``module`` (the model, a copy or a part of it; None: the model) that began
        now: as told, else as the linear layers have it, else the default.

        Raises ValueError for a block that no format has, or that this one has not.
        """
        q1 = None
        if self.bits is None or self.format_name is None:  # the search takes time, and a forward asks each time
            module = self.model if module is None else module
            layer = self.layer(module)
            q1 = self._q1_without_layers(module) if layer is None else layer.quantizers.q1
        return _format(self.bits, self.format_name, self.block_size, q1)

    def _q1_without_layers(self, module: nn.Module) -> Format | None:
        return getattr(module, STASH_FORMAT, getattr(self.model, STASH_FORMAT, None))

    def level(self, module: nn.Module) -> str:
        return super().level(module) or str(self._q1_without_layers(module))

    def codec(self, module: nn.Module) -> "BlockCodec":
        return BlockCodec(_formats(self.format_now(module)))

    def enter_graph(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled():
            return
        if self._compiles_alone(module):  # as in the graph of a whole step
            torch._dynamo.graph_break(
                msg="dsq.compile(model) has compiled the model; its graphs are not part of others"
            )
        note_graph(self, self.level(module))  # a guard on the level, so that a rise compiles once more

    def _compiles_alone(self, module: nn.Module) -> bool:
        """Return whether the graph that a compiler traces now would take in, and save exact, what dsq.compile did."""
        return self.partitioner is not None and not has_partitioner() and any(compiled_blocks(module))

    _compiles_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def graph_bits(self, module: nn.Module) -> int:
        """Return the bits in which a partitioner packs in graphs of ``module`` now; 0: it saves tensors exact."""
        bits = self.format_now(module).bits
        return min(bits + GRAPH_EXTRA_BITS, MAX_GRAPH_BITS) if bits <= MAX_GRAPH_BITS else 0

    def details(self) -> tuple[str, ...]:
        graphs = self.graph_summary()
        return (f"format {self.format_now()}", *([graphs] if graphs else []))

    def graph_summary(self) -> str:
        """Return a line on what compiled graphs save; "" without any."""
        texts = [] if self.partitioner is None else [self.partitioner.summary()]
        if self.has_exact_graph:
            texts.append("other " * len(texts) + "graphs save tensors exact: they were compiled without dsq.compile")
        return "; ".join(texts)


@lru_cache(maxsize=64)  # asked for in each forward
def _format(bits: int | None, name: str | None, block_size: int | None, q1: Format | None) -> Format:
    """Return the format of ``bits``; what is not given as the linear layers have it, whose format is ``q1``."""
    if bits is None:
        bits = MIN_BITS if q1 is None else max(MIN_BITS, q1.bits)
    if q1 is not None and name is None and block_size is None:
        return q1.at(bits)
    if name is None:
        name = DEFAULT if q1 is None else q1.name
    return named(name, bits, **({} if block_size is None else {"block_size": block_size}))


@lru_cache(maxsize=64)
def _formats(fmt: Format) -> dict[Role, Format]:
    """Return the format of each role's saved tensors; nothing if they stay as they are."""
    if not fmt.packs:
        return {}
    return {role: fmt.at(min(fmt.bits + EXTRA_BITS.get(role, 0), MAX_PACKED_BITS)) for role in get_args(Role)}


class BlockCodec:
    """Codes in blocks of neighbors."""

    def __init__(self, formats: Mapping[Role, Format]) -> None:
        self.formats = formats

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Encoded | None:
        fmt = self.formats.get(role)
        return None if fmt is None else encode_blocks(values, fmt)
