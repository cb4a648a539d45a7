"""Ways to train that are costed: a number format at widths q0..q3, a policy of dsq.stash, an optimizer, devices.

A format of the registry needs no line here: its name and its numeric fields are what a user may say of it. Which
tensors a policy codes, and as what, the ledger says; how many bits it gives them stands in dsq/stash_bits.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from dsq import formats
from dsq.arguments import choice, whole_number
from dsq.costmodel.model.ledger import Stored
from dsq.costmodel.model.operations import Gemm, Operation
from dsq.formats import MAX_PACKED_BITS, SCALE_BITS, WIDEST, Format, GridFormat, Identity, Layout
from dsq.operands import MIN_WEIGHT_BITS, OperandSpec, level_texts, parse_level
from dsq.precision import DEFAULT_LEVELS, Precision, parse_levels
from dsq.stash_bits import EXTRA_BITS, GACT_GROUP, MAX_EXACT_NUMEL, MESA_BITS, MIN_BITS, Role


class Half(Identity):
    """Values as they are in fp16; floats of 16 bits without a name are bf16."""

    @property
    def multiplier_bits(self) -> int:
        return self.significand_bits


@dataclass(frozen=True)
class Setup:
    """A quantization that is costed."""

    format: Format  #: its own bits do not matter: the precision has them
    precision: Precision
    container: int = 0  #: bits of what no quantizer touches; 0: as few as the precision allows
    min_weight_bits: int = MIN_WEIGHT_BITS  #: of w in the product for dx; 0: q1, as the paper has it
    autocast: bool = False  #: torch.autocast: parameters and the residual stream stay in fp32, products cast them

    @cached_property
    def container_bits(self) -> int:
        """Width `a` of tensors no quantizer touches (norms, softmax...): 16 if q0..q3 fit, else 32, unless told."""
        widest = max(*self.precision, *(spec.float_bits for spec in self.specs.values()))
        return max(self.container, MAX_PACKED_BITS if widest <= MAX_PACKED_BITS else WIDEST)

    def floats(self, bits: int, name: str = "-") -> Identity:
        """Return values that no quantizer touches, of an operand's float by name; "-": of the one that all others
        name."""
        names = {name} - {"-"} or {spec.float_name for spec in self.specs.values()} - {"-"}
        return (Half if names == {"fp16"} else Identity)(bits)

    @cached_property
    def specs(self) -> dict[str, OperandSpec]:
        """How the level writes each operand of a linear layer and dx, by its name in dsq.operands."""
        return self.precision.operands_with(self.min_weight_bits)._asdict()

    @cached_property
    def operands(self) -> dict[str, Format]:
        """The format of each operand of a linear layer and of dx; of "-" floats of the container."""
        family, named = self.format.at, bool(self.precision.text)
        return {
            name: (spec.with_family(family).resolved if named else family(int(spec.format)))
            or self.floats(spec.float_bits or self.container_bits, spec.float_name)
            for name, spec in self.specs.items()
        }

    def operands_of(self, op: Gemm) -> dict[str, Format]:
        """Return the same of a converted product: of two activations both gradients read Q2(dy) and Q1, of four
        widths."""
        linear = self.operands
        widths = {"dy_for_dw": linear["dy_for_dx"], "w_for_dx": linear["x_for_dw"]}
        return linear if op.weight or self.precision.text else linear | widths

    @property
    def stash(self) -> Format:
        """The format in which a converted layer saves its input; one that does not pack saves the input itself."""
        return self.operands["x_for_dw"]

    @property
    def mode(self) -> str:
        """The use of dsq: "simulation" if a product has a quantized operand or result, "saving" if the stash alone is
        packed; empty: neither."""
        if any(fmt.quantizes for name, fmt in self.operands.items() if name != "x_for_dw"):
            return "simulation"
        return "saving" if self.stash.packs else ""

    @cached_property
    def names_stash(self) -> bool:
        """Whether the level names the format of x in dw, so that the layer saves x itself under ``stash="all"`` too."""
        operands = self.precision.operands_with(self.min_weight_bits)
        return bool(self.precision.text) and operands.with_family(self.format.at).names_stash

    @property
    def family(self) -> str:
        """The name of the format that the level's bits are of; empty: it names the format of each operand."""
        return self.format.name if any(spec.format.isdecimal() for spec in self.specs.values()) else ""

    def stored_bits(self, op: Gemm, operand: str, word: int) -> float:
        """Return the bits that a value of a product's operand takes in DRAM, blocks in whole words of so many bits.

        ceil((block m + scale) / word) word / block where the format has blocks, else m; of a format by name, as mxfp4,
        its own bytes.
        """
        fmt = self.operands_of(op)[operand]
        if isinstance(fmt, GridFormat) or self.specs[operand].format in formats.NAMED:
            layout = Layout(1, -(-op.M // op.weights), op.K, along_rows=False)
            return 8 * fmt.nbytes(layout) / (layout.rows * layout.columns)
        block = fmt.block_size
        return -(-(block * fmt.bits + SCALE_BITS) // word) * word / block if block else fmt.bits

    def __str__(self) -> str:
        return f"{self.family} {self.precision}".strip()


FP32 = Setup(Identity(WIDEST), Precision(32, 32, 32, 32))
BF16 = Setup(Identity(WIDEST), Precision(16, 16, 16, 16))
AUTOCAST = replace(BF16, autocast=True)
DSQ = formats.format_class(formats.DEFAULT)(WIDEST)  #: the default format


def format_names() -> tuple[str, ...]:
    return (*formats.FORMATS, Identity.name)


def has_blocks(name: str) -> bool:
    """Return whether --block-size is of the format. Raises ValueError for an unknown name."""
    choice("format", name, format_names())
    return name != Identity.name and "block_size" in formats.options(name)


def template(name: str, described: Mapping[str, Any]) -> Format:
    """Return the format, with the block size that `described` has; None or absent: the default. Raises ValueError."""
    size = described.get("block_size") if has_blocks(name) else None
    kind: type[Format] = Identity if name == Identity.name else formats.format_class(name)
    return kind(WIDEST) if size is None else kind(WIDEST, **{"block_size": size})


#: widths with the name of their family in front
_PREFIXED = re.compile(r"\s*(\w+)\s*:\s*(\[.*|[\d\s,]+)", re.DOTALL)
#: what no model's name has: a bracket, a bar, a colon; or nothing but widths up to the first comma
_AS_LEVELS = re.compile(r".*[][|:].*|[\d\s]*(,.*)?", re.DOTALL)


def is_precision(text: str) -> bool:
    """Return whether a text is a schedule, or is written as one, so that parse_setups names its fault."""
    prefixed = _PREFIXED.fullmatch(text)
    try:
        return all(map(parse_level, level_texts(prefixed[2] if prefixed else text)))
    except ValueError:
        return bool(_AS_LEVELS.fullmatch(text))


def parse_setups(text: str, described: Mapping[str, Any]) -> list[Setup]:
    """Return one setup, or those of a schedule: "[16,4,4,16]", "bfp:[4,4,4,8]", "[4,3,3,8] [8,4,4,8]"; in the format,
    block size and container that `described` has, by the options' names. Raises ValueError."""
    name, widths = prefixed.groups() if (prefixed := _PREFIXED.fullmatch(text)) else ("", text)
    levels = parse_levels(widths)
    fmt = template(name.lower() or described["format"], described)
    least = described.get("min_weight_bits")
    least = MIN_WEIGHT_BITS if least is None else whole_number("min_weight_bits", least, 0, WIDEST)
    setups = [Setup(fmt, level, described.get("container") or 0, least) for level in levels]
    floats = {one.bits for setup in setups for one in setup.operands.values() if isinstance(one, Identity)}
    for bits in floats - {MAX_PACKED_BITS, WIDEST}:
        raise ValueError(f"float must have 16 or 32 bits, got {bits} in {text!r}: fewer have names, as fp8_tensor")
    return setups


def used_options(text: str, described: Mapping[str, Any]) -> set[str]:
    """Return the options that change what a precision costs, of its format's."""
    setup = parse_setups(text, described)[-1]
    used = {
        "format": not _PREFIXED.fullmatch(text),
        "min_weight_bits": "|" not in setup.precision.text,
        "block_size": bool(setup.family) and has_blocks(setup.family),
    }
    return {name for name in used if used[name] and setup.family}


# ---- policies of dsq.stash

#: scale and index of a sampled row
ROW_BYTES = 4 + 8


@dataclass(frozen=True)
class CostedPolicy:
    """A policy, or policies together. The ledger says which tensors are coded, and as what (Stored.coded)."""

    name: str
    bits: float = 0  #: bits of a value in codes, scales included; 0: nothing is coded
    format: Format | None = None  #: of codes that have more bits in some tensors (dsq.stash_bits.EXTRA_BITS)
    masks: bool = True  #: relu and dropout keep a bit a value
    ratio: float = 1  #: part of the rows of a linear layer's input that are saved

    def saved_bytes(self, op: Operation, stored: Stored, size: float, values: float) -> float:
        """Return the bytes that the policy saves of one tensor, which has ``size`` bytes and so many values."""
        coded = stored.copied if stored.copied and size < values * WIDEST / 8 else stored.coded
        if coded == "bit":  # no policy sees what PyTorch's attention writes out
            return values / 8 if self.masks and op.container != "state" else size
        if isinstance(op, Gemm) and stored.name == "x" and op.weight:
            if self.samples(op):
                sampled = round(self.ratio * op.M) * op.K
                return sampled * min(size / values, self.code_bits("linear") / 8) + ROW_BYTES * self.ratio * op.M
            values = min(values, op.M * op.K)  # of a part of x that is read
        if not self.bits or coded == "" or values <= MAX_EXACT_NUMEL:
            return size
        return 0.0 if coded == "recomputed" else min(size, values * self.code_bits(coded) / 8)

    def samples(self, op: Gemm) -> bool:
        """Return whether the policy samples rows of the input: of an nn.Linear, which no expert, convolution or Conv1D
        is."""
        convolution = 0 < op.x_values <= op.M * op.K
        linear = op.weight and op.weights == 1 and not op.transposed and not convolution and (op.quantized or op.tied)
        return linear and self.ratio < 1

    def code_bits(self, role: Role) -> float:
        """Return the bits of a value that is coded as ``role``, scales included; of a float if nothing is coded."""
        if not self.bits:
            return WIDEST
        fmt = self.format
        return value_bits(fmt.at(min(fmt.bits + EXTRA_BITS.get(role, 0), MAX_PACKED_BITS))) if fmt else self.bits


@lru_cache(maxsize=1024)
def value_bits(fmt: Format) -> float:
    """Return the bits of a value among many neighbors, its part of the blocks' scales included."""
    row = Layout(1, 1, 2**20, along_rows=False)
    return round(8 * fmt.nbytes(row) / row.columns, 3)  # without what is stored once a tensor


def packed_in(fmt: Format, name: str = "", **fields: Any) -> CostedPolicy:
    """Return the policy "bfp" of dsq.stash in this format; one that does not pack codes nothing."""
    return CostedPolicy(name or f"bfp {fmt.bits}", value_bits(fmt) if fmt.packs else 0, fmt, **fields)


#: name -> the policies that a plan compares
POLICIES = {
    policy.name: policy
    for policy in (
        CostedPolicy("selective"),
        packed_in(DSQ.at(4)),
        packed_in(DSQ.at(2)),
        CostedPolicy("mesa", MESA_BITS),
        CostedPolicy("gact 4", 4 + 64 / GACT_GROUP),
        CostedPolicy("wtacrs 0.3", masks=False, ratio=0.3),
        packed_in(DSQ.at(4), "wtacrs 0.3 + bfp 4", ratio=0.3),
    )
}


def whole_stash(setup: Setup) -> CostedPolicy:
    """Return the policy that dsq.DSQConfig(stash="all") runs beside layers of this setup."""
    return packed_in(setup.stash.at(max(MIN_BITS, setup.stash.bits)))


# ---- methods of training


@dataclass(frozen=True)
class Optimizer:
    """State that an optimizer keeps, and traffic of its update."""

    state: float  #: bytes a parameter
    traffic: float = 1  #: bytes that its update moves, as a share of Adam's
    master: bool = True  #: whether it updates fp32 weights; else 16-bit weights by 16-bit gradients
    foreach: float = 0  #: bytes a parameter that torch.optim.AdamW's update adds for a while unless it has fused=True


#: traffic of Adam's update without fused=True over that of one kernel: calls of torch._foreach_* read or write a tensor
#: of the parameters' size 20 times, the kernel 7 times (torch/optim/adam.py, _multi_tensor_adam)
FOREACH_TRAFFIC = 20 / 7
#: names -> optimizers. 8 bits: a scale of 4 bytes for 256 values (bitsandbytes). factored: Adafactor without a first
#: moment, a row and a column for a matrix (Shazeer and Stern, 2018)
OPTIMIZERS = {
    "adam": Optimizer(8, foreach=4),
    "adam-8bit": Optimizer(2 + 2 * 4 / 256, 18 / 30),
    "adam-16bit": Optimizer(4, 14 / 30, master=False, foreach=2),
    "adam-8bit-16bit": Optimizer(2 + 2 * 4 / 256, 10 / 30, master=False),
    "adafactor": Optimizer(0, 18 / 30),
    "sgd": Optimizer(0, 14 / 30),
    "sgd-16bit": Optimizer(0, 6 / 30, master=False),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The devices, their shares of the state, and the optimizer: all methods of a plan have them in common."""

    devices: int = 1  #: data-parallel ones
    zero: int = 0  #: 1: the optimizer's state is shared out, 2: and gradients, 3: and parameters
    optimizer: str = "adam"  #: a key of OPTIMIZERS
    offload: bool = False  #: its state, with the master weights beside a working copy, lies in the host's memory
    foreach: bool = False  #: the update copies the weights (see Optimizer)
    in_backward: bool = False  #: a layer's weights are updated, and its gradients freed, as soon as they are there
    compiled: bool = False  #: torch.compile, or kernels written by hand, fuse pointwise passes
    base_bits: float = 0  #: bits of a layer's frozen weights, which are multiplied as 16 bits; 0: as all weights


@dataclass(frozen=True)
class Method(Training):
    """A way to train: at a precision, with what is saved, over so many devices."""

    name: str
    setup: Setup
    stash: CostedPolicy | None = None  #: a policy of dsq.stash
    recompute: bool = False  #: a layer saves its input alone and runs its forward again
    selective: bool = False  #: but for the products whose results it keeps too (entries.saved_results)
    in_flight: int = 1  #: micro-batches whose forward is saved at once, by the first stage of a pipeline
    accumulates: bool = False  #: gradients of earlier micro-batches are there, and each new one beside its sum
    trusted: bool = True  #: trainings support it (docs/evidence.md); else a table shows it, and no advice names it

    @property
    def mode(self) -> str:
        """See Setup.mode: a policy of dsq.stash saves as well."""
        return self.setup.mode or ("saving" if self.stash and self.stash.bits else "")

    def shared_by(self, stage: int) -> int:
        """Return the number of devices that share what ZeRO shares from this stage on (1 also the update)."""
        return self.devices if self.zero >= stage else 1


#: the levels of the paper's schedule that end it, and ours
LEVELS = (Precision(16, 4, 4, 16), Precision(4, 4, 4, 8), *DEFAULT_LEVELS)
#: a level and a policy of dsq -> the setting of docs/evidence.md whose trainings support it, which a test holds
TRUSTED = {
    **{f"dsq {level}{stash}": f"{level}{stash}" for level in DEFAULT_LEVELS for stash in ("", " all")},
    "bfp 4": f"{DEFAULT_LEVELS[-1]} all",
    "recompute, bfp 4": f"{DEFAULT_LEVELS[-1]} all, checkpoint",
}
USUAL = (
    Method("fp32", FP32),
    Method("bf16 autocast", AUTOCAST),
    Method("bf16", BF16),
    *(Method(f"dsq {level}", Setup(DSQ, level), trusted=f"dsq {level}" in TRUSTED) for level in LEVELS),
    *(Method(f"dsq {level} all", Setup(DSQ, level), stash=whole_stash(Setup(DSQ, level))) for level in DEFAULT_LEVELS),
    *(Method(f"bf16, {name}", BF16, stash=policy, trusted=name in TRUSTED) for name, policy in POLICIES.items()),
    Method("bf16, selective recompute", BF16, recompute=True, selective=True),
    Method("bf16, recompute", BF16, recompute=True),
    Method("bf16 autocast, recompute", AUTOCAST, recompute=True),
    Method("bf16, recompute, bfp 4", BF16, stash=POLICIES["bfp 4"], recompute=True),
)
#: LoRA over weights of 16 bits, or of 4. PEFT's adapters are fp32 unless told, and each keeps a copy of its input
ADAPTERS = tuple(
    Method(f"{{}}{by}{again}", BF16, recompute=bool(again)) for by in ("", " by PEFT") for again in ("", ", recompute")
)
