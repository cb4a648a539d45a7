"""Does a training fit, how fast is it, what bounds it, and what would help: `dsq-cost plan`, `dsq.costmodel.plan`."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from dsq.arguments import choice, whole_number
from dsq.costmodel.hardware.hardware import GIGA, Hardware, load_hardware
from dsq.costmodel.model.entries import Category
from dsq.costmodel.model.ledger import COMPILED
from dsq.costmodel.model.memory import Memory, update_copy
from dsq.costmodel.model.methods import ADAPTERS, FP32, OPTIMIZERS, USUAL, Method, Training
from dsq.costmodel.model.operations import Operation, Pointwise, Workload
from dsq.costmodel.names import refuse
from dsq.costmodel.planning.step import (
    Stages,
    StepTime,
    offloaded_bytes,
    sent_bytes,
    sharded_memory,
    sharded_peak,
    sharded_step,
)
from dsq.costmodel.workloads.named import AskedStep, load_shapes
from dsq.costmodel.workloads.transformer import Shard
from dsq.formats import WIDEST
from dsq.precision import damage

#: the most devices, sequences of a batch and tokens of a sequence
MAX_SIZE = 2**20
#: from one batch that is tried to the next, until one does not fit
GROWTH = 6
#: bits of a weight in NF4: a scale of 8 bits for 64 values, and one of 32 for 256 scales (QLoRA, 2023, section 3)
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
#: bits of frozen weights that a user may ask for -> those that each takes; 0: as all weights
BASE_BITS = {0: 0, 4: NF4_BITS, 8: 8, 16: 0, 32: 32}
#: what PyTorch's allocator reserved in published trainings, over what is predicted, in the median (docs/cost-model.md)
RESERVED = 1.14
#: advice names what makes a step this much quicker, a token
WORTH_IT = 1.05
#: options of a question that its answer repeats
ASKED = (
    *("devices", "zero", "tensor", "pipeline", "accumulate"),
    *("optimizer", "offload", "foreach", "in_backward", "compiled"),
)
#: batches that advice tries
MAX_ADVISED = 64
#: CATEGORIES, as JSON has them
_SHORT = ("param_GB", "grad_GB", "optim_GB", "activ_GB", "stash_GB", "logits_GB", "temp_GB")
_BOUNDS = {"link": "the link between devices", "host": "Python, which launches its kernels"}


@dataclass(frozen=True)
class Question(Training):
    """A training step, how it is trained, and on which hardware."""

    step: AskedStep
    hardware: Hardware
    methods: tuple[Method, ...] = ()  #: methods to compare; none: the usual ones
    budget: float = 0  #: bytes of a device; 0: the hardware's
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1  #: batches of a step, on each data-parallel device
    train_tokens: float = 0  #: tokens of the whole training; 0: not asked
    price: float = 0  #: of an hour of a device

    def __post_init__(self) -> None:
        choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("devices", "tensor", "pipeline", "accumulate"):
            whole_number(name, getattr(self, name), 1, MAX_SIZE)
        stored, shares_more = self.step.weight_format(), self.accumulate > 1 or self.pipeline > 1 or self.zero > 1
        refuse(
            (
                not self.memory,
                f"hardware {self.hardware.name!r} does not state its memory: give --fit, as in --fit 80GB",
            ),
            (
                self.all_devices > 1 and not self.hardware.link,
                f"hardware {self.hardware.name!r} states no link: several devices need [link] gb_per_s in its file",
            ),
            (
                self.offload and not self.hardware.host,
                f"hardware {self.hardware.name!r} states no [host] gb_per_s in its file: --offload needs it",
            ),
            (
                self.zero and self.devices == 1,
                f"--zero {self.zero} does nothing where one replica trains: give more --devices, or leave it out",
            ),
            (
                self.zero > 1 and self.pipeline > 1,
                "--zero 2 and 3 do not go with --pipeline: its micro-batches' gradients are summed whole",
            ),
            (
                stored and not (self.base_bits and stored.startswith(f"{int(self.base_bits)}-bit")),
                f"workload {self.step.workload}: quantization_config stores {stored} weights, which --qlora RANK "
                "or --lora RANK --base-bits 8 trains adapters over; to plan with 16-bit weights leave the field out",
            ),
            (
                self.foreach and (self.in_backward or not OPTIMIZERS[self.optimizer].foreach),
                "--foreach is of --optimizer adam and adam-16bit, not --in-backward: leave it out",
            ),
            (
                self.price and not self.train_tokens,
                "--price needs --train-tokens, the tokens of the whole training, as in 10B",
            ),
            (
                self.in_backward and shares_more,
                "--in-backward frees gradients at once: leave out --accumulate, --pipeline and --zero 2 or 3",
            ),
        )

    @classmethod
    def of(
        cls,
        workload: str,
        hardware: str,
        *,
        fit: float = 0,
        qlora: int | None = None,
        gpus: int | None = None,
        base_bits: int = 0,
        **options: Any,
    ) -> "Question":
        """Return the question of the options of `dsq.costmodel.plan`. Raises as that does."""
        lora, inside = options.get("lora"), options.get("tensor", 1) * options.get("pipeline", 1)
        refuse(
            (lora is not None and qlora is not None, "give --lora or --qlora, not both: --qlora has a rank of its own"),
            (
                base_bits and lora is None and qlora is None,
                "--base-bits does nothing without --lora: leave it out",
            ),
            (
                gpus is not None and (not 1 <= gpus <= MAX_SIZE or gpus % inside),
                f"--gpus {gpus} must be a positive multiple of --tensor times --pipeline ({inside})",
            ),
        )
        options |= {
            "optimizer": str(options.get("optimizer", "adam")).lower().replace("adamw", "adam"),
            **({} if qlora is None else {"lora": qlora}),
            **({} if gpus is None else {"devices": gpus // inside}),
        }
        device = load_hardware(hardware)
        AskedStep.build.cache_clear()  # a config.json may have changed since the last question
        AskedStep.parts.cache_clear()
        of_step = {name: options.pop(name) for name in vars(AskedStep()) if name in options}
        return cls(
            AskedStep(workload, cpu=device.cpu, **of_step),
            device,
            budget=fit,
            base_bits=BASE_BITS[base_bits or (4 if qlora is not None else 0)],
            **options,
        )

    @property
    def memory(self) -> float:
        """Bytes of a device that may be used."""
        return self.budget or self.hardware.memory_bytes

    @property
    def shard(self) -> Shard:
        return Shard(self.tensor, self.pipeline)

    @property
    def all_devices(self) -> int:
        """Data-parallel devices, times those that share a model."""
        return self.devices * self.tensor * self.pipeline

    def compared(self) -> tuple[Method, ...]:
        """Return the methods, each over the devices that are asked for."""
        methods = self.methods or USUAL
        if self.step.lora is not None and not self.methods:
            base = {NF4_BITS: "QLoRA", 8: "8-bit LoRA", WIDEST: "fp32 LoRA"}.get(self.base_bits, "LoRA")
            name = f"{base} {self.step.lora}"
            methods = tuple(replace(method, name=method.name.format(name)) for method in ADAPTERS)
        training: dict[str, Any] = {name: getattr(self, name) for name in vars(Training())}
        if self.base_bits == WIDEST:  # all computes in fp32
            training |= {"setup": FP32, "base_bits": 0}
        return tuple(replace(method, **training) for method in methods)

    def stages(self, method: Method, **sizes: Any) -> Stages:
        """Return a device's operations of one micro-batch, of the first and the last stage; sizes: in place of the
        step's."""
        stages = replace(self.step, **sizes).parts(self.shard, copies=" by PEFT" in method.name)
        return changed_stages(stages, compiled_workload) if self.compiled else stages

    def cost_of(self, method: Method, **sizes: Any) -> "MethodCost":
        """Return the method's cost, without its largest batch; sizes: in place of the step's."""
        stages, device = self.stages(method, **sizes), (method, self.shard, self.accumulate)
        memory = sharded_memory(stages, *device)
        fits, reserved = memory.peak <= self.memory, reserved_bytes(memory, method, self.hardware)
        return MethodCost(
            method,
            memory,
            sharded_step(stages, *device, self.hardware),
            tokens=stages[0].tokens * self.accumulate * method.devices,
            fits=fits,
            tight=fits and reserved > self.memory,
            fits_chunked=fits or sharded_peak(changed_stages(stages, Workload.chunking_loss), *device) <= self.memory,
            reserved=min(reserved, self.memory) if fits else reserved,
            sent=sent_bytes(stages, *device),
            host=max(offloaded_bytes(stage, method) for stage in stages),
            copied=max(update_copy(stage, method) for stage in stages),
        )

    def ask(self, batches: bool = True) -> "Plan":
        """Return the answer; batches: with the largest one of each method. Raises ValueError for what cannot be
        planned."""
        rows = [self.cost_of(method) for method in self.compared()]
        if batches and self.step.sized:
            rows = [replace(row, largest_batch=largest(self, row.method)) for row in rows]
        return Plan(self, tuple(rows))


@dataclass(frozen=True)
class MethodCost:
    """One method's memory and time; figures of one device, but for the tokens."""

    method: Method
    memory: Memory
    step: StepTime
    tokens: int  #: tokens of a step on all devices together
    fits: bool
    tight: bool  #: it fits as allocated, and would not as reserved
    fits_chunked: bool  #: whether it fits if the loss is made in chunks or by a fused kernel
    reserved: float  #: bytes that PyTorch's allocator reserves
    sent: float  #: bytes that a device sends in a step
    host: float  #: bytes of its state in the host's memory
    copied: float  #: bytes that an update which is not fused adds
    largest_batch: int | None = None  #: sequences; None: the workload states its batch

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.launched

    def record(self) -> dict[str, Any]:
        """Return the row as JSON has it (docs/cost-model.md, "JSON of a plan")."""
        memory, step = self.memory, self.step
        return {
            "method": self.method.name,
            "mode": self.method.mode,
            "fits": "tight" if self.tight else "yes" if self.fits else "chunked loss" if self.fits_chunked else "no",
            "peak_GB": memory.peak / GIGA,
            "reserved_GB": self.reserved / GIGA,
            "peak_at": memory.cause,
            "saved_GB": memory.saved / GIGA,
            "host_GB": self.host / GIGA,
            **{name: size / GIGA for name, size in zip(_SHORT, memory.categories.values(), strict=True)},
            "step_ms": step.launched * 1e3,
            "step_ms_low": step.launched * step.low * 1e3,
            "step_ms_high": step.launched * step.high * 1e3,
            "graphs_ms": step.seconds * 1e3,
            "bound": step.bound,
            "compute_ms": (step.compute + step.update) * 1e3,
            "packing_ms": step.packing * 1e3,
            "packing_measured": step.packing_measured,
            "communication_ms": step.communication * 1e3,
            "communication_GB": self.sent / GIGA,
            "tokens/s": self.tokens_per_second,
            "trusted": self.method.trusted,
            **({} if self.largest_batch is None else {"largest_batch": self.largest_batch}),
        }


def reserved_bytes(memory: Memory, method: Method, hardware: Hardware) -> float:
    """Return the bytes that PyTorch's allocator reserves. FSDP's shards of gradients lie in blocks of the stream that
    scatters them, which no other stream reuses."""
    shards = 0.0
    if method.zero == 3:
        shards = float(memory.bytes[:, Category.GRADIENTS].max()) - memory.categories["gradients"]
    return (memory.peak + shards) * (1 if hardware.cpu else RESERVED)


class Most(NamedTuple):
    """The largest size with which a step fits, with any of several methods."""

    size: int
    method: str
    capped: bool  #: no larger one was tried


@dataclass(frozen=True)
class Plan:
    """The answer to a question: a row a method, and what it comes to in words."""

    question: Question
    rows: tuple[MethodCost, ...]

    @cached_property
    def workload(self) -> Workload:
        return self.question.step.build()

    @cached_property
    def shown(self) -> tuple[MethodCost, ...]:
        """The rows that advice may name, or those that were asked for."""
        return tuple(row for row in self.rows if row.method.trusted or self.question.methods)

    @cached_property
    def best(self) -> MethodCost:
        """The quickest trusted row that fits, the smallest of those as quick; where none fits, the quickest of those
        that need least memory."""
        trusted = [row for row in self.rows if row.method.trusted] or list(self.rows)
        fitting = [row for row in trusted if row.fits]
        if fitting:
            return max(fitting, key=lambda row: (row.tokens_per_second, -row.memory.peak))
        return min(trusted, key=lambda row: (round(row.memory.peak / (GIGA / 10)), -row.tokens_per_second))

    @cached_property
    def answer(self) -> str:
        """Two sentences: whether and how it fits; how long a step takes, what bounds it, and what helps."""
        question, best, step = self.question, self.best, self.best.step
        lora, devices = question.step.lora, question.all_devices
        model = self.workload.name + (f" with LoRA of rank {lora}" if lora is not None else "")
        if tokens := question.step.beyond_positions():
            model += f" at {tokens:,} tokens{self._beyond(tokens)},"
        several = f"each of {devices:,}" if devices > 1 else "one"
        room = f"{_size(question.memory)} of {several} {question.hardware.name}"
        peak = f"takes {_size(best.memory.peak)}"
        if best.fits:
            if best.reserved > best.memory.peak:
                peak += f" (about {_size(best.reserved)} reserved)"
            first = f"{model} fits in the {room}: {best.method.name} {peak}{', which is tight' * best.tight}"
            first += self._largest_sizes
        else:
            sizes = best.memory.categories
            most = max(sizes, key=lambda name: sizes[name]).replace("temporary", "temporaries")
            first = (
                f"{model} does not fit in the {room}: {best.method.name}, which needs least, {peak}, most of it {most}"
            )
        low, high = _time(step.launched * step.low), _time(step.launched * step.high)
        takes = f"{_time(step.launched)} ({low} to {high})" if step.low < step.high else f"at least {low}"
        unit, tokens = self._unit
        shares = ", ".join(f"{share:.0%} {name}" for name, share in step.shares.items() if share > 0)
        bound = f"bound by {_BOUNDS[step.bound]}" if step.bound in _BOUNDS else shares
        second = (
            f"A step of {best.tokens // tokens:,} {unit} takes {takes}, {self._rate(best)}, {bound}; {self.advice}."
        )
        return re.sub(r"\b1 (sequence|token|image)s\b", r"1 \1", f"{first}. {second}{self._of_training}")

    @property
    def _largest_sizes(self) -> str:
        """The largest batch and the longest context in words, each with its method where that is not the best; and what
        --chunked-loss makes of both where it is more by WORTH_IT."""
        text, chunked, grown = "", _by_chunks(self.question), list[str]()
        methods = {row.method.name: row.method for row in self.rows}
        images = "images" if self.workload.patches else "sequences"
        for unit, most, begin, items in (
            ("sequences", self.largest_batch, "and by allocated memory the largest batch that fits has", images),
            ("tokens", self.longest_context, "the longest context", "tokens"),
        ):
            if most:
                text += f", {begin} {'at least ' * most.capped}{most.size:,} {items}"
                text += f" ({most.method})" * (most.method != self.best.method.name)
            if most and chunked and not most.capped:
                size = largest(chunked, methods[most.method], unit, least=most.size)
                grown += [f"{size:,} {items}"] * (size > WORTH_IT * most.size)
        if self.longest_context and not self.question.step.beyond_positions():
            text += self._beyond(self.longest_context.size)
        return text + f" (with --chunked-loss {', '.join(grown)})" * bool(grown)

    def _beyond(self, tokens: int) -> str:
        """Return what is said of a sequence that has more tokens than the model has positions; empty: it has not."""
        positions = self.question.step.positions()
        return f", beyond its {positions:,} positions" if 0 < positions < tokens else ""

    @cached_property
    def largest_batch(self) -> Most | None:
        """The most sequences that fit with a method that is shown; None: none fits, or a workload file states them."""
        row = max(self._best_first, key=lambda row: row.largest_batch or 0)
        if not row.largest_batch or not self.best.fits:
            return None
        return Most(row.largest_batch, row.method.name, capped=row.largest_batch == MAX_SIZE)

    @cached_property
    def longest_context(self) -> Most | None:
        """The most tokens of a sequence that fit with a method that is shown, at the batch that is asked for; None: not
        asked, or none fits."""
        step, longest = self.question.step, None
        if not step.sized or step.source_length or step.target_length or self.workload.patches or not self.best.fits:
            return None
        for row in self._best_first:
            size = largest(self.question, row.method, "tokens", least=longest.size if longest else 0)
            if not longest or size > longest.size:
                longest = Most(size, row.method.name, capped=size == MAX_SIZE)
        return longest

    @cached_property
    def least_devices(self) -> str:
        """The fewest devices that a shown method fits, and the least stage of ZeRO that it needs of them: "6, ZeRO 3";
        empty: not even 1,024 do, or one without a link."""
        counts = [2**power for power in range(11 if self.question.hardware.link else 1)]
        enough = next((count for count in counts if self._least_zero(count) is not None), 0)
        if not enough:
            return ""
        between = range(enough // 2 + 1, enough)
        count = between.start + bisect_left(between, True, key=lambda fewer: self._least_zero(fewer) is not None)
        zero = self._least_zero(count)
        return f"{count * self.question.shard.devices}" + f", ZeRO {zero}" * bool(zero)

    def _least_zero(self, devices: int) -> int | None:
        """Return the least stage of ZeRO with which a shown method fits so many devices; None: none does."""
        question = self.question
        zeros = range(1 + (_most_zero(question) if devices > 1 else 0))
        methods = (replace(row.method, devices=devices, zero=zero) for zero in zeros for row in self.shown)
        device = question.shard, question.accumulate
        return next(
            (one.zero for one in methods if sharded_peak(question.stages(one), one, *device) <= question.memory), None
        )

    @property
    def _best_first(self) -> list[MethodCost]:
        """The rows that are shown: the best one, then those of least memory."""
        return sorted(self.shown, key=lambda row: (row is not self.best, row.memory.peak))

    @cached_property
    def _priced(self) -> tuple[str, Question, MethodCost] | None:
        """What hours and price are of: this step, or the advised one if it does not fit; None: there is none."""
        return ("", self.question, self.best) if self.best.fits else self.change_to_fit

    @property
    def hours(self) -> float | None:
        """The time of the whole training."""
        return self.question.train_tokens / self._priced[2].tokens_per_second / 3600 if self._priced else None

    @property
    def cost(self) -> float | None:
        """The price of the whole training, all devices together."""
        priced, hours = self._priced, self.hours
        return None if priced is None or hours is None else hours * self.question.price * priced[1].all_devices

    @property
    def _of_training(self) -> str:
        """A sentence on the whole training; empty: not asked, or nothing fits."""
        if not self.question.train_tokens or not self._priced:
            return ""
        change = f"With {self._priced[0]} " if self._priced[0] else ""
        price = (
            f" and cost {self.cost:,.0f} at {self.question.price:g} an hour and device" if self.question.price else ""
        )
        return f" {change}{self.question.train_tokens:,.0f} tokens take {self.hours:,.1f} hours{price}."

    @property
    def _unit(self) -> tuple[str, int]:
        """Return the unit in which a step is counted, and how many tokens one of it is."""
        return ("images", self.workload.patches) if self.workload.patches else ("tokens", 1)

    def _rate(self, row: MethodCost) -> str:
        unit, tokens = self._unit
        return f"{row.tokens_per_second / tokens:,.0f} {unit}/s"

    @cached_property
    def advice(self) -> str:
        """The cheapest change that helps: that makes it fit, or quicker by a twentieth."""
        if not self.best.fits and self.change_to_fit:
            option, _, row = self.change_to_fit
            return (
                f"cheapest change that helps: {option} ({row.method.name}: {_size(row.memory.peak)}"
                f"{', tight' * row.tight})"
            )
        if not self.best.fits:
            return "no change that dsq-cost knows makes it fit: take a smaller model or larger devices"
        if not self.question.step.sized:
            return "its batch is fixed: trace it with another one"
        quickest, change = WORTH_IT * self.best.tokens_per_second, ""
        step, questions = self.question.step, {"": self.question}
        most = max(MAX_ADVISED, 2 * (step.sequences or load_shapes(step.workload).sequences))
        if self.best.memory.categories["logits"] and (chunked := _by_chunks(self.question)):
            questions["--chunked-loss "] = chunked  # without logits a larger batch fits
        for option, question in questions.items():
            own_first = sorted(self.rows, key=lambda row: row is not self.best)
            for method, fitting in ((row.method, row.largest_batch) for row in own_first if row.method.trusted):
                is_counted = question is self.question and fitting is not None
                batch = min(fitting or 0 if is_counted else largest(question, method), most)
                cost = question.cost_of(method, sequences=batch) if batch else None
                if cost and cost.tokens_per_second > quickest:
                    quickest = WORTH_IT * cost.tokens_per_second
                    change = f"{option}--sequences {batch} with {method.name} ({self._rate(cost)})"
        return f"cheapest change that helps: {change}" if change else "a larger batch would not make it quicker"

    @cached_property
    def change_to_fit(self) -> tuple[str, Question, MethodCost] | None:
        """The cheapest change that makes it fit: its option, its question, its quickest row. A tight one comes after
        all that train the same weights; None: there is none."""
        tight: tuple[str, Question, MethodCost] | None = None
        trusted = [row for row in self.rows if row.method.trusted and row.largest_batch]
        batches = (largest(self.question, row.method, most=row.largest_batch or 0, reserved=True) for row in trusted)
        batch = max(batches, default=0) or max((row.largest_batch or 0 for row in trusted), default=0)
        for option, changed in _changes(self.question, batch):
            if tight and changed.step.lora != self.question.step.lora:
                break
            costs = (changed.cost_of(method) for method in changed.compared() if method.trusted)
            rows = [row for row in costs if row.fits]
            if rows:
                change = option, changed, max(rows, key=lambda row: (not row.tight, row.tokens_per_second))
                if not change[2].tight:
                    return change
                tight = tight or change
        return tight

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it: answer, workload, hardware, methods, notes."""
        workload, question = self.workload, self.question
        return {
            "answer": self.answer,
            "workload": workload.name,
            **{name: getattr(workload, name) for name in ("tokens", "parameters", "trained", "macs", "source")},
            "hardware": question.hardware.name,
            "rates": question.hardware.rates,
            "hardware_sources": question.hardware.sources,
            "budget_bytes": question.memory,
            **{name: getattr(question, name) for name in ASKED},
            "best": self.best.method.name,
            "largest_batch": self.largest_batch and self.largest_batch._asdict(),
            "longest_context": self.longest_context and self.longest_context._asdict(),
            "hours": self.hours,
            "cost": self.cost,
            "methods": [row.record() for row in self.rows],
            "notes": self.notes,
        }

    @cached_property
    def notes(self) -> list[str]:
        question, rows = self.question, self.rows
        parts = [f"{question.devices} data parallel, ZeRO {question.zero}", *filter(None, [str(question.shard)])]
        unfused = [row.method.name for row in rows if row.fits and row.memory.totals[-1] + row.copied > question.memory]
        left_out = (
            ", workspaces and what a process takes besides (up to 0.1 GB)"
            if question.hardware.cpu
            else f" and workspaces; PyTorch's allocator reserves {RESERVED - 1:.0%} more in the median, and nvidia-smi "
            "shows half a GB besides"
        )
        units = {peak.datatype for peak in question.hardware.peaks}
        doubted = ", ".join(row.method.name for row in rows if not row.method.trusted)
        setups = dict.fromkeys(row.method.setup for row in rows)
        notes = (
            *((True, f"{line}.") for setup in setups for line in damage([setup.precision], setup.family, "nearest")),
            (True, f"the peak comes at the {'; '.join(dict.fromkeys(row.memory.cause for row in rows))}."),
            (
                question.step.stores_scores(),
                "attention's scores are stored: with --fused-attention they stay on chip.",
            ),
            (
                any(row.largest_batch == MAX_SIZE for row in rows),
                f"largest batch: no more than {MAX_SIZE:,} are tried.",
            ),
            (
                any(gemm.container for gemm in self.workload.gemms),
                "attention with dropout or a learned bias is written out by PyTorch on a CPU, its scores saved in "
                "fp32; policies of dsq.stash keep none of them.",
            ),
            (
                question.all_devices > 1,
                f"{', '.join(parts)}: memory and time of one device, tokens/s of all together.",
            ),
            (question.offload, f"--offload: {_size(self.best.host)} a device lie in the host's memory."),
            (
                unfused and not question.foreach,
                f"give AdamW fused=True: its other update (--foreach) does not fit with {', '.join(unfused)}.",
            ),
            (
                any(row.tight for row in rows),
                f"tight: fits as allocated, and not with the {RESERVED - 1:.0%} that PyTorch's allocator reserves "
                "besides in the median (ZeRO 3: of shards of gradients too): give it expandable_segments:True.",
            ),
            (
                any(row.fits_chunked and not row.fits for row in rows),
                "fits, chunked loss: with --chunked-loss, or a fused kernel of cross-entropy.",
            ),
            (
                True,
                f"memory: allocated tensors, without fragmentation{left_out} (docs/cost-model.md).",
            ),
            (
                "fp16" in units and "bf16" not in units,
                "its units take no bf16: read fp16 with a scaled loss, at the same size and time.",
            ),
            (
                doubted,
                f"not advised{', nor shown without --all' * (not question.methods)}, as no training of "
                f"docs/evidence.md supports them: {doubted}.",
            ),
            (
                not all(row.step.packing_measured for row in rows),
                "packing was never measured on this hardware: its bytes at the bandwidth are counted.",
            ),
            (
                any(row.step.launched > row.step.seconds for row in rows),
                "step ms: kernel by kernel from Python, by the host of the H100 that was measured (docs/gpu.md); "
                "graphs ms: of CUDA graphs.",
            ),
            (True, f"times: {question.hardware.rates}."),
        )
        return [note for holds, note in notes if holds]


def compiled(op: Operation) -> Operation:
    """Return what torch.compile or a fused kernel makes of it."""
    return replace(op, kind=COMPILED[op.kind]) if isinstance(op, Pointwise) and op.kind in COMPILED else op


def compiled_workload(workload: Workload) -> Workload:
    return replace(workload, operations=tuple(map(compiled, workload.operations)))


@lru_cache(maxsize=64)  # other caches know what is the same object at once
def changed_stages(stages: Stages, change: Callable[[Workload], Workload]) -> Stages:
    return tuple(map(change, stages))


def _changes(question: Question, largest_batch: int) -> Iterator[tuple[str, Question]]:
    """Return the changes that need less memory, the least change first, each with its option."""
    step, hardware, most_zero = question.step, question.hardware, _most_zero(question)
    shares_more = question.devices > 1 and question.zero < most_zero
    trains_by_adam = question.optimizer == "adam" and step.lora is None
    offloads = trains_by_adam and hardware.host and not question.offload
    frees_gradients = question.zero < 2 and question.accumulate * question.pipeline == 1
    adapts = step.sized and not question.methods
    adapts_few_bits = adapts and not question.base_bits
    lora = replace(step, lora=step.lora or 16, freeze=None)
    chunked = replace(lora, chunked_loss=True)
    changes: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        (step.stores_scores(), "--fused-attention", {"step": replace(step, fused_attention=True)}),
        (shares_more, f"--zero {most_zero}", {"zero": most_zero}),
        (largest_batch, f"--sequences {largest_batch}", {"step": replace(step, sequences=largest_batch)}),
        (_by_chunks(question), "--chunked-loss", {"step": replace(step, chunked_loss=True)}),
        (trains_by_adam, "--optimizer adam-8bit", {"optimizer": "adam-8bit"}),
        (trains_by_adam, "--optimizer adam-16bit", {"optimizer": "adam-16bit"}),
        (offloads, "--offload", {"offload": True}),
        (
            offloads and frees_gradients,
            "--optimizer adam-8bit-16bit --offload --in-backward",  # torchtune's, on one device
            {"optimizer": "adam-8bit-16bit", "offload": True, "in_backward": True},
        ),
        (adapts and step.lora is None, "--lora 16", {"step": lora}),
        *(
            (count > question.devices, f"--devices {count} --zero {most_zero}", {"devices": count, "zero": most_zero})
            for count in ((2, 4, 8) if hardware.link and question.shard.devices == 1 else ())
        ),
        (adapts_few_bits, f"--qlora {lora.lora}", {"step": lora, "base_bits": NF4_BITS}),
        (adapts_few_bits, f"--qlora {lora.lora} --chunked-loss", {"step": chunked, "base_bits": NF4_BITS}),
    )
    return ((option, replace(question, **fields)) for holds, option, fields in changes if holds)


def _most_zero(question: Question) -> int:
    return 3 if question.pipeline == 1 and not question.in_backward else 1


def _by_chunks(question: Question) -> Question | None:
    """Return the question with --chunked-loss; None: it has that, or no loss to make in chunks."""
    has_loss = any(op.kind.startswith("loss") for op in question.step.build().operations)
    chunks = has_loss and not (question.step.chunked_loss or question.step.fused_loss)
    return replace(question, step=replace(question.step, chunked_loss=True)) if chunks else None


def _size(bytes_: float) -> str:
    return f"{bytes_ / GIGA:,.1f} GB" if bytes_ >= GIGA / 10 else f"{bytes_ / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def largest(
    question: Question,
    method: Method,
    size: str = "sequences",
    most: int = MAX_SIZE,
    least: int = 0,
    reserved: bool = False,
) -> int:
    """Return the most sequences of a device, or tokens of a sequence, whose step fits; ``least``: none above it
    does; ``reserved``: as the allocator reserves, so that it is not tight."""
    if size == "tokens":
        most = load_shapes(question.step.workload).table_positions or most
    low, high = least, most + 1  # this fits, this does not
    previous: tuple[int, Memory] | None = None
    count = least + 1
    while high - low > 1:
        stages = question.stages(method, **{size: count})
        memory = sharded_memory(stages, method, question.shard, question.accumulate)
        overhead = reserved_bytes(memory, method, question.hardware) / memory.peak if reserved else 1
        budget = question.memory / overhead
        low, high = (count, high) if memory.peak <= budget else (low, count)
        guess = _reaching(budget, *previous, count, memory) if previous else count * GROWTH
        count, previous = min(max(guess, low + 1), high - 1), (count, memory)
    return low


def _reaching(budget: float, previous_count: int, previous_memory: Memory, count: int, memory: Memory) -> int:
    """Return the size whose peak is the budget if each moment's memory grows in a straight line."""
    ends, starts = memory.totals, previous_memory.totals
    if len(ends) != len(starts):  # the fullest stage of a pipeline was another one
        ends, starts = ends.max(keepdims=True), starts.max(keepdims=True)
    slopes = (ends - starts) / (count - previous_count)
    grows = slopes > 0
    growth = (budget - ends[grows]) // slopes[grows]
    return min(MAX_SIZE, count + int(growth.min(initial=MAX_SIZE)))
