"""The training step that a user asks about: a model, the sizes of its batch, and what of it trains."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from costmodel.model.operations import Workload
from costmodel.workloads.named import load_shapes, load_workload
from costmodel.workloads.shapes import MAX_SIZE
from costmodel.workloads.shard import Shard, stages
from dsq.arguments import whole_number

DEFAULT_MODEL = "transformer_iwslt_de_en"
#: the layers that get adapters unless told: every linear layer of every block
ADAPTED = r"layers\.\d+\..*(_proj|fc\d)$"


@dataclass(frozen=True)
class AskedStep:
    """A training step. Fields are named as the options of dsq-cost."""

    workload: str = DEFAULT_MODEL  #: a name (completed), a Hugging Face config.json or a workload file
    sequences: int | None = None  #: sequences of a batch; None: the model's
    tokens: int | None = None  #: tokens of a sequence, on both sides
    source_length: int | None = None  #: tokens that the encoder reads, of a sequence
    target_length: int | None = None  #: tokens that the decoder reads, of a sequence
    fused_attention: bool = False  #: also where the model does not run it so
    eager_attention: bool = False  #: attention's scores are stored
    quantise_attention: bool = False
    tied: bool = False  #: an output projection that shares its weight with a table is converted too
    exclude: str | None = None  #: regex of layers that are not converted
    freeze: str | None = None  #: regex of layers whose parameters are not trained
    lora: int | None = None  #: rank of adapters, which alone are trained
    lora_layers: str = ADAPTED  #: regex of the layers that have them
    chunked_loss: bool = False

    @lru_cache(maxsize=64)  # noqa: B019 - questions are few
    def build(self, copies: bool = False) -> Workload:
        """The step. copies: adapters keep copies of their inputs, as PEFT's do. Raises ValueError."""
        return self._changed(load_workload(self.workload, fused=self._fused, **self._sizes()), copies)

    @lru_cache(maxsize=64)  # noqa: B019
    def parts(self, shard: Shard, copies: bool = False) -> tuple[Workload, ...]:
        """A device's part of the step, of the first stage and of the last. Raises ValueError where it cannot be cut."""
        if shard.devices == 1:
            return (self.build(copies),)
        model = load_shapes(self.workload, **self._sizes())
        fuses = model.fuses if self._fused is None else self._fused
        cut = (stage.fusing_attention() if fuses else stage for stage in stages(model, shard))
        return tuple(self._changed(stage, copies) for stage in cut)

    def positions_lacking(self) -> str:
        """A note if sequences are longer than a table of positions that the model has; else ""."""
        model = load_shapes(self.workload, **self._sizes())
        for stack, length in ((model.encoder, model.source_length), (model.decoder, model.target_length)):
            known = dict(stack.tables).get("positions", length) if stack and not stack.patches else length
            if known < length:
                return f"{model.name} has {known:,} positions: it takes no {length:,} tokens as it is."
        return ""

    @property
    def _fused(self) -> bool | None:
        return False if self.eager_attention or self.quantise_attention else self.fused_attention or None

    def _sizes(self) -> dict[str, Any]:
        names = ("sequences", "source_length", "target_length")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.tokens is not None:
            if len(given) > ("sequences" in given):
                raise ValueError("tokens are those of a sequence on both sides: leave out the two lengths")
            model = load_shapes(self.workload)
            sides = {"source_length": model.encoder, "target_length": model.decoder}
            given |= {name: self.tokens for name, stack in sides.items() if stack}
        return given

    def _changed(self, workload: Workload, copies: bool) -> Workload:
        if self.quantise_attention:
            workload = _unless_idle(workload, workload.quantising_attention(), "--quantise-attention")
        if self.tied:
            workload = _unless_idle(workload, workload.converting_tied(), "--tied")
        if self.exclude:
            whole, workload = workload, workload.excluding(self.exclude)
            if workload == whole:
                raise ValueError(f"exclude {self.exclude!r} matches none of the workload's converted layers")
        if self.freeze:
            workload = _unless_idle(workload, workload.freezing(self.freeze), "--freeze")
        if self.lora is not None:
            workload = workload.adapting(whole_number("lora", self.lora, 1, MAX_SIZE), self.lora_layers, copies)
        if self.chunked_loss:
            workload = _unless_idle(workload, workload.chunking_loss(), "--chunked-loss")
        return workload


def _unless_idle(before: Workload, after: Workload, option: str) -> Workload:
    """``after``. Raises ValueError where the option did nothing."""
    if after == before:
        raise ValueError(f"{option} does nothing for {before.name}: leave it out")
    return after


def asked(**given: Any) -> AskedStep:
    """The step of those options that a step has; others are ignored."""
    return replace(AskedStep(), **{name: value for name, value in given.items() if name in vars(AskedStep())})
