"""Workloads by name (models.toml), from a Hugging Face config.json, or from a workload file; and the
training step that a user asks about: the sizes of its batch, and what of the model trains."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from dsq.arguments import whole_number
from dsq.command import read_json, read_toml
from dsq.costmodel.model.operations import Workload
from dsq.costmodel.names import completed, refuse
from dsq.costmodel.workloads import config_json, workload_file
from dsq.costmodel.workloads.shapes import MAX_SIZE, Head, Stack, Transformer
from dsq.costmodel.workloads.transformer import Shard, build, stages

DEFAULT_MODEL = "transformer_iwslt_de_en"
#: the layers that get adapters unless told: every linear layer of every block
ADAPTED = r"layers\.\d+\..*(_proj|fc\d)$"
#: what names on Hugging Face's hub have besides, of models of the same shape: "meta-llama/Meta-", "-Instruct-v0.2"
_ENDS = r"instruct|chat|it|hf|deduped|uncased|cased|v\d+(\.\d+)*"
_RELEASE = re.compile(rf"^([^/]+/)?(meta-)?|(-({_ENDS}))+$", re.IGNORECASE)


_MODELS: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_name("models.toml"))


def names() -> list[str]:
    """Return the names of all workloads that have one."""
    return list(_MODELS)


def load_workload(name: str, fused: bool | None = None, cpu: bool = False, **sizes: int) -> Workload:
    """Return a workload by name (completed), from a Hugging Face config.json, or from a workload file. Raises
    ValueError.

    fused: attention runs in a fused kernel, where one takes it; None: as the model runs it. cpu: on a CPU, else on a
    GPU. sizes: sequences, source_length, target_length, where they are not the model's.
    """
    loaded = _load(name)
    if not isinstance(loaded, Workload):
        model = _sized(loaded, sizes)
        loaded, fused = build(model), model.fuses if fused is None else fused
    elif sizes:
        raise ValueError(
            f"workload file {name} states its own sizes: {', '.join(sizes)} cannot be changed; trace it with others"
        )
    return _run(loaded, fused, cpu)


def _run(workload: Workload, fused: bool | None, cpu: bool) -> Workload:
    workload = workload.on_cpu() if cpu else workload
    return workload.fusing_attention(cpu) if fused else workload


def load_shapes(name: str, **sizes: int) -> Transformer:
    """Return a model by name or from a Hugging Face config.json. Raises ValueError, for a workload file too."""
    loaded = _load(name)
    if isinstance(loaded, Workload):
        raise ValueError(f"workload file {name} states one device's operations, which cannot be cut for more")
    return _sized(loaded, sizes)


def _load(name: str) -> Transformer | Workload:
    if not name.endswith(".json"):
        if not Path(name, "config.json").is_file():
            otherwise = ", or a .json file (a config.json or a workload file), or a folder with a config.json"
            sources = {entry["source"].partition(";")[0].lower(): model for model, entry in _MODELS.items()}
            return _of_models(completed("workload", sources.get(name.lower(), name), names(), otherwise, _RELEASE))
        name = str(Path(name, "config.json"))
    data = read_json(Path(name))
    if workload_file.is_workload(data):
        return workload_file.parse(data, name)
    return config_json.transformer_of(data, name)


def _of_models(name: str) -> Transformer:
    """Return the model that models.toml states, as its config or as its stacks."""
    entry = _MODELS[name]
    if "config" in entry:
        model = config_json.transformer_of(entry["config"], entry["source"], name)
    else:
        encoder, decoder = (
            Stack(side, **entry[side] | {"tables": tuple(map(tuple, entry[side]["tables"]))})
            for side in ("encoder", "decoder")
        )
        model = Transformer(name, Head(**entry["head"]), encoder, decoder, source=entry["source"])
    return replace(model, **entry.get("step", {}))


def _sized(model: Transformer, sizes: Any) -> Transformer:
    for length, side in (("source_length", "encoder"), ("target_length", "decoder")):
        stack, size, most = getattr(model, side), sizes.get(length, 0), model.table_positions
        refuse(
            (size and not stack, f"{length} does nothing for {model.name}, which has no {side}: leave it out"),
            (
                size and stack and stack.patches,
                f"{length} is what the patches of {model.name} are: leave it out",
            ),
            (
                most and size > most,
                f"{model.name} has a table of {most:,} positions: give at most as many tokens",
            ),
        )
    return replace(model, **sizes)


# ---- what a user asks about


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
    exclude: str | None = None  #: regex of layers that are not converted
    tied: bool = False  #: a tied output projection is converted too
    freeze: str | None = None  #: regex of layers whose parameters are not trained
    lora: int | None = None  #: rank of adapters, which alone are trained
    lora_layers: str = ADAPTED  #: regex of the layers that have them
    lora_dropout: bool = False  #: in front of each adapter
    chunked_loss: bool = False
    fused_loss: bool = False
    cpu: bool = False  #: by a CPU's kernels; no option, but the hardware's fact

    @cached_property
    def sized(self) -> bool:
        """Whether its batch may be changed; a workload file's may not."""
        return not isinstance(_load(self.workload), Workload)

    @lru_cache(maxsize=64)  # noqa: B019 - questions are few
    def build(self, copies: bool = False) -> Workload:
        """Return the step. copies: adapters keep copies of their inputs, as PEFT's do. Raises ValueError."""
        adapts = self.lora is not None
        refuse(
            (
                self.lora_layers != ADAPTED and not adapts,
                "lora_layers does nothing without lora: leave it out",
            ),
            (self.lora_dropout and not adapts, "lora_dropout does nothing without lora: leave it out"),
            (
                self.freeze and adapts,
                "freeze does nothing beside lora, which trains adapters alone: leave it out",
            ),
        )
        if adapts:
            whole_number("lora", self.lora, 1, MAX_SIZE)
        workload = load_workload(self.workload, self._fused, self.cpu, **self._sizes())
        for change, fault in self._changes(copies):
            before, workload = workload, change(workload)
            if workload == before:
                raise ValueError(fault.replace("{}", workload.name))
        if self.freeze and not workload.trained:
            raise ValueError(f"freeze {self.freeze!r} leaves nothing to train: give a narrower expression")
        return workload

    @lru_cache(maxsize=64)  # noqa: B019
    def parts(self, shard: Shard, copies: bool = False) -> tuple[Workload, ...]:
        """Return a device's part of the step, of the first stage and of the last. Raises ValueError where it cannot be
        cut."""
        whole = self.build(copies)  # which refuses what does nothing; of one stage it may do nothing
        if shard.devices == 1:
            return (whole,)
        model = load_shapes(self.workload, **self._sizes())
        fuses = model.fuses if self._fused is None else self._fused
        shards = [_run(stage, fuses, self.cpu) for stage in stages(model, shard)]
        for change, _ in self._changes(copies):
            shards = [change(stage) for stage in shards]
        return tuple(shards)

    def weight_format(self) -> str:
        """Return the format in which a config.json stores weights of few bits; empty: it does not."""
        return "" if isinstance(loaded := _load(self.workload), Workload) else loaded.weight_format

    def positions(self) -> int:
        """Return the positions that the model was made for; 0: not stated."""
        return 0 if isinstance(model := _load(self.workload), Workload) else model.positions

    def beyond_positions(self) -> int:
        """Return the tokens of a sequence that has more than the model has positions; else 0."""
        longest = max(self._sizes().get(name, 0) for name in ("source_length", "target_length"))
        return longest if longest > self.positions() > 0 else 0

    def stores_scores(self) -> bool:
        """Return whether a fused kernel would take the attention of the step, which runs without one unasked."""
        fused = replace(self, fused_attention=True)
        return not self.eager_attention and fused.build().macs != self.build().macs

    @property
    def _fused(self) -> bool | None:
        return False if self.eager_attention else self.fused_attention or None

    def _sizes(self) -> dict[str, int]:
        names = ("sequences", "source_length", "target_length")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.tokens is None:
            return sizes
        refuse(
            (
                len(sizes) > ("sequences" in sizes),
                "tokens are those of a sequence on both sides: leave out the two lengths",
            ),
            (
                self.tokens > MAX_SIZE,
                f"tokens are those of a sequence, got {self.tokens:,}: those of a training are --train-tokens",
            ),
        )
        model = _load(self.workload)
        if isinstance(model, Workload):
            return {"tokens": self.tokens}  # which its file refuses
        sides = {"source_length": model.encoder, "target_length": model.decoder}
        return sizes | {name: self.tokens for name, stack in sides.items() if stack}

    def _changes(self, copies: bool) -> list[tuple[Callable[[Workload], Workload], str]]:
        """Return what the options change of a workload, and what is wrong where that is nothing."""
        idle = "--{} does nothing for {{}}: leave it out"
        adapting: dict[str, Any] = {"rank": self.lora, "layers": self.lora_layers, "dropout": self.lora_dropout}
        changes: tuple[tuple[object, Callable[[Workload], Workload], str], ...] = (
            (
                self.tied,
                Workload.converting_tied,
                "--tied does nothing for {}, whose projection is not tied: leave it out",
            ),
            (
                self.exclude,
                partial(Workload.excluding, exclude=self.exclude or ""),
                f"exclude {self.exclude!r} matches none of the workload's converted layers",
            ),
            (self.freeze, partial(Workload.freezing, frozen=self.freeze or ""), idle.format("freeze")),
            (self.lora is not None, partial(Workload.adapting, copies=copies, **adapting), ""),
            (self.chunked_loss, Workload.chunking_loss, idle.format("chunked-loss")),
            (self.fused_loss, Workload.fusing_loss, idle.format("fused-loss")),
        )
        return [(change, fault) for holds, change, fault in changes if holds]


def asked(**options: Any) -> AskedStep:
    """Return the step of those options that a step has; others are ignored."""
    return replace(AskedStep(), **{name: value for name, value in options.items() if name in vars(AskedStep())})
