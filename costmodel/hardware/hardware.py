"""Hardware profiles: TOML data files (profiles/*.toml, a user's own, or one that `dsq-cost calibrate` measured). Their
fields stand in docs/cost-model.md ("A hardware file").

A stated figure is multiplied by its `efficiency`, the share that programs reach.

`holds` says the widest operand of each format that the datatype multiplies exactly, or the wider operand and the other.
A format by name (mxfp8, nvfp4) is held whatever its scale rule and the rows of its blocks. A format that it does not
name is held where its significands are: those of a format with blocks as bfp's, others as fixed point's. Wider codes
are split: a product takes as many passes as the parts of one operand times those of the other (16 x 2 bits on bf16
units: two), each exact, summed in fp32. Floats, and widths above 16 bits, which are kept as floats, are not split. A
measured peak is a kernel: it does not split, and the first that holds a product counts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq.command import read_toml
from dsq.costmodel.fields import Fields
from dsq.costmodel.names import completed, suggestion
from dsq.formats import BFP, FORMATS, NAMED, WIDEST, FixedPoint, Format, Identity, parse_format

DEFAULT_HARDWARE = "a100-80gb"
#: other names of profiles, with the memory of the usual card
ALIASES = {
    "h100-80gb": "h100",
    "h100-pcie-80gb": "h100-pcie",
    "h800-80gb": "h800",
    "v100-32gb": "v100",
    "h200-141gb": "h200",
    "b200-180gb": "b200",
    "b200-192gb": "b200",
    "mi300x-192gb": "mi300x",
}
_PROFILES = Path(__file__).with_name("profiles")
MAX_WORD = 4096  #: bits of a word of DRAM
PICO, NANO, MICRO = 1e-12, 1e-9, 1e-6
MEGA, GIGA, TERA = 10**6, 10**9, 10**12


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's rates that a step reaches: the constants of the time model.

    `analysis.published fit` of commit 42c1cfa6 fitted `memory` and `exposed`, and the share of attention that the files
    of the A100 and the H100 state, to one half of the published trainings; the other half judges them
    (docs/cost-model.md).
    """

    #: rate at which a step's kernels move tensors, as a share of the file's bandwidth ([step]): some move more than the
    #: ledger's
    memory: float = 0.62
    fused: bool = False  #: whether torch.compile, or kernels written by hand, fuse passes (ledger.FUSED)
    #: whether a kernel computes while it moves (a roofline), and quantizing an operand writes no copy of it in 16 bits
    overlaps: bool = False
    #: rate of experts' products, as a share of a linear layer's: fitted to two trainings of Mixtral, judged by none
    experts: float = 0.68
    exposed: float = 0.74  #: share of the time of sending that a step waits for, though it computes meanwhile
    launch: float = 8 * MICRO  #: least seconds of a kernel: PyTorch does not launch one sooner (assumed)
    #: seconds of each hop of a message round a ring, in a node and between two (NVIDIA/nccl, src/graph/tuning.cc: ring,
    #: protocol Simple)
    hop: float = 3.4 * MICRO
    hop_between_nodes: float = 14 * MICRO


#: for rates that were measured, which leave nothing out
MEASURED = Efficiency(memory=1, experts=1, overlaps=True, exposed=1, launch=0, hop=0, hop_between_nodes=0)
#: of a file that states no [step]: a chip that reaches its roofline
ROOFLINE = Efficiency(memory=1, experts=1, overlaps=True, launch=0)


@dataclass(frozen=True)
class Pass:
    """Measured time of a pass over values."""

    per_value: float = 0  #: seconds
    per_call: float = 0  #: seconds

    def seconds(self, values: float, calls: int = 1) -> float:
        """Return the time of ``calls`` passes over so many values together."""
        return values * self.per_value + calls * self.per_call


@dataclass(frozen=True)
class Peak:
    """A datatype's dense matrix rate."""

    datatype: str
    flops: float  #: floating or integer operations a second that programs reach (a multiply-accumulate is two)
    #: name of a format -> widest operand it multiplies exactly: the wider one of a product, the other one
    holds: dict[str, tuple[int, int]]
    source: str
    datasheet_flops: float = 0  #: operations a second as the datasheet has them; 0: measured
    around: Pass = Pass()  #: time of a product beside its operations, of the values of its operands and result
    attention: "FusedUnit | None" = None  #: as measured; None: the hardware's share of this rate

    @property
    def multiplies_floats(self) -> bool:
        """Whether its units take floats of 16 bits, as which codes are multiplied; else they take codes."""
        return self.holds.get(Identity.name, (0, 0))[0] >= 16

    def passes(self, first: Format, second: Format) -> int:
        """Return the number of exact passes in which the unit multiplies such operands; 0: it cannot."""
        wider, other = sorted((first, second), key=lambda operand: -operand.bits)
        passes = self.parts(wider, 0) * self.parts(other, 1)
        return passes if passes == 1 or self.datasheet_flops else 0

    def parts(self, operand: Format, side: int = 0) -> int:
        """Return the number of operands of its own into which the unit splits this one, exactly; 0: it cannot.

        A code splits into its significand's higher and lower bits, as 15 bits into 8 and 7; a float does not.
        """
        names = (operand.unit_name, BFP.name if operand.block_size else FixedPoint.name)
        named, similar = (self.holds.get(name, (0, 0))[side] for name in names)
        if named >= operand.bits:
            return 1
        significand = max(named, similar) - 1
        if isinstance(operand, Identity) or significand < 1:
            return 0
        parts = -(-operand.unit_significand(self.multiplies_floats) // significand)
        return parts if operand.packs or parts == 1 else 0


@dataclass(frozen=True)
class FusedUnit:
    """Measured times of a product in a fused attention kernel."""

    flops: float  #: operations a second
    around: Pass  #: time beside them, of the values of q, k, v and the result that it reads or writes
    causal: float  #: share of the time that a causal mask leaves: kernels spare less than the mask does

    def seconds(self, flops: float, whole: float, values: float) -> float:
        """Return the time of a product of `whole` operations without a mask, of which the mask left `flops`."""
        return max(flops, self.causal * whole) / self.flops + self.around.seconds(values)


@dataclass(frozen=True)
class Rate:
    """How a product of two operands runs: in so many exact passes of one unit."""

    peak: Peak
    passes: int  #: parts of the one operand times parts of the other; their products are summed

    @property
    def flops(self) -> float:
        """Operations a second of the product that is wanted, all its passes counted as one."""
        return self.peak.flops / self.passes

    def seconds(self, flops: float, values: float, calls: int) -> float:
        """Return the time of `calls` products that have so many operations, and values in operands and results,
        together."""
        return flops / self.flops + self.peak.around.seconds(values, calls)

    def __str__(self) -> str:
        return f"{self.passes} x {self.peak.datatype}" if self.passes > 1 else self.peak.datatype


@dataclass(frozen=True)
class Energy:
    """Energy that others published, in joules: estimated, and without what a chip takes when idle."""

    dram: float  #: of a byte that crosses DRAM
    sram: float  #: of a byte that is written to the on-chip buffer, or read from it; 0: not stated
    macs: dict[str, float]  #: datatype of a peak -> of a multiply-accumulate


@dataclass(frozen=True)
class Hardware:
    name: str
    bandwidth: float  #: DRAM bytes a second that programs reach
    vector_flops: float  #: elementwise operations a second
    peaks: tuple[Peak, ...]
    sources: dict[str, str]
    memory_bytes: float = 0  #: size of DRAM; 0: not stated
    memory_type: str = ""  #: as "GDDR6X"; empty: not stated
    #: bits of the words of DRAM in which converted products' tensors lie at their own bits; 0: they lie in containers
    word: int = 0
    cpu: bool = False  #: PyTorch's kernels are those of CPUs
    link: float = 0  #: bytes a second to the other devices, each way; 0: not stated
    host: float = 0  #: bytes a second to the host's memory, each way; 0: not stated
    measured: str = ""  #: when and how; empty: the figures are stated by others
    datasheet_bandwidth: float = 0  #: as the datasheet has it; 0: measured
    network: float = 0  #: bytes a second from a node to other nodes, each way; 0: not stated
    node: int = 0  #: devices of a node, between which the link runs; 0: all
    attention: float = 1  #: rate of a fused attention kernel, as a share of a product's, where its peak states none
    efficiency: Efficiency = Efficiency()  #: shares of the rates that steps reach
    passes: dict[tuple[str, int, str], Pass] = field(default_factory=dict)  #: (kind, container bits, phase)
    energy: Energy | None = None  #: None: not stated
    sram: float = 0  #: bytes of the on-chip buffer; 0: not stated

    def moving(self, nbytes: float) -> float:
        """Return the seconds that a step's kernels take to move so many bytes."""
        return nbytes / (self.bandwidth * self.efficiency.memory)

    def rate(self, first: Format, second: Format) -> Rate:
        """Return the fastest way to multiply two such operands exactly. Raises ValueError where there is none."""
        able = [Rate(peak, passes) for peak in self.peaks if (passes := peak.passes(first, second))]
        if not able:
            wider = max(first, second, key=lambda operand: operand.bits)
            missing = f"{wider.name} operands of {wider.bits} bits"
            raise ValueError(f"hardware {self.name!r} has no peak that holds {missing}")
        return able[0] if self.measured else max(able, key=lambda rate: rate.flops)

    @property
    def rates(self) -> str:
        """The source of its times, in words."""
        if self.measured:
            return f"measured ({self.measured})"
        stored = f"; converted layers' tensors in DRAM at their own bits, in words of {self.word}" if self.word else ""
        parts = [f"{peak.datatype} {peak.flops / peak.datasheet_flops:.2f}" for peak in self.peaks]
        parts.append(f"DRAM {self.bandwidth / self.datasheet_bandwidth:.2f}")
        if self.efficiency.overlaps:
            stored = f", the longer of a kernel's two times{stored}"
            return f"a roofline: stated rates x efficiency ({', '.join(parts)}){stored}"
        parts += [f"a step's kernels {self.efficiency.memory:.2f} of it", f"fused attention {self.attention:.2f}"]
        return f"estimated: datasheet rates x efficiency ({', '.join(parts)}){stored}"


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in _PROFILES.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Return a named profile, or the TOML file at a path. Raises ValueError that names a missing or mistyped field."""
    path = Path(name)
    if path.suffix != ".toml":
        name = completed("hardware", name, [*profile_names(), *ALIASES], ", or a .toml file")
        name = ALIASES.get(name, name)
        path = _PROFILES / f"{name}.toml"
    data = read_toml(path, f"hardware file {name}")
    try:
        return _hardware(Fields(_completed(Fields(data))))
    except ValueError as error:
        raise ValueError(f"hardware file {name}: field {error}") from None


_SHARE = ("efficiency", "efficiency_source")
_SPEED = ("gb_per_s", "source", *_SHARE)
_TERMS = ("tflops", "ns_per_value", "us_per_call")
#: the keys of each table of a file; "": of the file
_KEYS = {
    "bandwidth": _SPEED,
    "link": _SPEED,
    "host": _SPEED,
    "network": ("devices", *_SPEED),
    "memory": ("gb", "type", "word_bits", "source"),
    "sram": ("mb", "source"),
    "vector": ("tflops", "source"),
    "step": _SHARE,
    "attention": _SHARE,
    "energy": ("dram_pj_per_byte", "sram_pj_per_byte", "mac_pj", "source"),
    "peak": ("datatype", "holds", "attention", "source", *_TERMS, *_SHARE),
    "pass": ("kind", "bits", "phase", *_TERMS),
}
_KEYS[""] = ("name", "cpu", "measured", "like", "source", *_KEYS)


#: what a file states, and each of its peaks
_NEEDED = ("name", "bandwidth.gb_per_s", "vector.tflops")
_NEEDED_OF_PEAKS = ("datatype", "tflops", "holds")


def _completed(file: Fields) -> dict[str, Any]:
    """Return the file's tables, with its source where they name none, and those of the profile that it is `like`.

    It changes that profile's tables key by key, and peaks by their datatype. Raises ValueError for a key that no table
    has, and for a file that is `like` another without a name.
    """
    data: dict[str, Any] = file.data
    source = file.get("source", str, "not stated")
    for name, keys in _KEYS.items():
        entries = data.get(name) if name else data
        for entry in entries if isinstance(entries, list) else [entries]:
            for key in entry if isinstance(entry, dict) else ():
                if key not in keys:
                    within = f"[{name}] has" if name else "a file has"
                    raise ValueError(f"{key} is not known; {suggestion(key, keys)}{within} {', '.join(keys)}")
            if name and isinstance(entry, dict):
                entry.setdefault("source", source)
    if "like" not in data:
        return data
    base = completed("hardware", file.get("like", str), profile_names())
    file.get("name", str)  # the other profile's would be taken for it
    tables = _completed(Fields(read_toml(_PROFILES / f"{base}.toml", base)))
    peaks = {peak["datatype"]: peak for peak in tables["peak"]}
    for peak in file.tables("peak"):
        datatype = peak.get("datatype", str)
        peaks[datatype] = peaks.get(datatype, {}) | peak.data
    changed = {
        name: table | data[name]
        for name, table in tables.items()
        if isinstance(table, dict) and isinstance(data.get(name), dict)
    }
    return tables | data | changed | {"peak": list(peaks.values())}


def _hardware(file: Fields) -> Hardware:
    peaks, measured = file.tables("peak"), file.get("measured", str, "")
    needed = [(file, name) for name in _NEEDED]
    needed += [(peak, name) for peak in peaks or [Fields({}, "peak[0].")] for name in _NEEDED_OF_PEAKS]
    absent = [table.label + name for table, name in needed if table.find(name) is None]
    file.refuse(absent, f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing")
    moving = [part for part in ("bandwidth", "link", "host", "network") if part in file.data]
    parts = [*moving, *(part for part in ("vector", "memory", "sram", "energy") if part in file.data)]
    # [step]: its kernels compute or move; without it they do both at once
    reached = Efficiency(memory=file.number("step.efficiency", most=1)) if "step" in file.data else ROOFLINE
    return Hardware(
        name=file.get("name", str),
        **{part: GIGA * file.number(f"{part}.gb_per_s") * _efficiency(file.table(part)) for part in moving},
        vector_flops=TERA * file.number("vector.tflops"),
        peaks=tuple(_peak(peak, bool(measured)) for peak in peaks),
        sources={part: _source(file.table(part)) for part in parts},
        memory_bytes=GIGA * file.number("memory.gb", 0),
        memory_type=file.table("memory").get("type", str, ""),
        word=file.table("memory").whole("word_bits", 0, most=MAX_WORD),
        cpu=file.get("cpu", bool, False),
        node=file.whole("network.devices", 0),
        attention=_efficiency(file.table("attention")),
        efficiency=MEASURED if measured else reached,
        measured=measured,
        datasheet_bandwidth=0 if measured else GIGA * file.number("bandwidth.gb_per_s"),
        passes={
            (timed.get("kind", str), timed.whole("bits"), timed.get("phase", str)): _pass(timed)
            for timed in file.tables("pass")
        },
        energy=_energy(file.table("energy"), [peak.get("datatype", str) for peak in peaks]),
        sram=MEGA * file.number("sram.mb", 0),
    )


def _energy(table: Fields, datatypes: list[str]) -> Energy | None:
    if table.data is None:
        return None
    macs = table.get("mac_pj", dict)
    for name in macs:
        table.refuse(name not in datatypes, f"mac_pj.{name} must be the datatype of a peak: {', '.join(datatypes)}")
    return Energy(
        dram=PICO * table.number("dram_pj_per_byte"),
        sram=PICO * table.number("sram_pj_per_byte", 0),
        macs={name: PICO * table.number(f"mac_pj.{name}") for name in macs},
    )


def _peak(table: Fields, measured: bool) -> Peak:
    flops, attention = TERA * table.number("tflops"), table.table("attention")
    fused = attention.data is not None
    return Peak(
        datatype=table.get("datatype", str),
        flops=flops * _efficiency(table),
        holds=_holds(table),
        source=_source(table),
        datasheet_flops=0 if measured else flops,
        around=_pass(table),
        attention=FusedUnit(TERA * attention.number("tflops"), _pass(attention), attention.number("causal"))
        if fused
        else None,
    )


def _holds(table: Fields) -> dict[str, tuple[int, int]]:
    held, widths = table.get("holds", dict), {}
    if held.get(Identity.name) == WIDEST:  # codes wider than 16 bits are kept in float32, which holds narrower ones too
        held = {BFP.name: WIDEST, FixedPoint.name: WIDEST} | held
    for name, bits in held.items():
        pair, unit = bits if isinstance(bits, list) else [bits, bits], _unit_name(name)
        are_bits = len(pair) == 2 and all(type(m) is int and 1 <= m <= WIDEST for m in pair)
        names = ", ".join((*FORMATS, Identity.name, *NAMED))
        text = f"must be bits from 1 to {WIDEST}, or those of the wider operand and the other, for one of {names}"
        table.refuse(not (unit and are_bits), f"holds.{name} {text}")
        widths[unit] = (max(pair), min(pair))
    return widths


def _unit_name(name: str) -> str:
    """Return what units that multiply a format are called: a family, or a format as levels have it; empty: it is
    neither."""
    try:
        return name if name in (*FORMATS, Identity.name) else parse_format(name).unit_name
    except ValueError:
        return ""


def _pass(table: Fields) -> Pass:
    return Pass(NANO * table.number("ns_per_value", 0, least=0), MICRO * table.number("us_per_call", 0, least=0))


def _efficiency(table: Fields) -> float:
    return table.number("efficiency", 1, most=1)


def _source(table: Fields) -> str:
    """Return where the figure comes from, and its efficiency."""
    share = table.find("efficiency")
    efficiency = f"; efficiency {share}: {table.get('efficiency_source', str, 'not stated')}"
    return table.get("source", str, "not stated") + efficiency * (share is not None)
