"""Hardware profiles: TOML data files (profiles/*.toml, or a user's own), each figure with its source.

    name = "..."
    [bandwidth]   gb_per_s = 2039    source = "..."     DRAM
    [memory]      gb = 80            source = "..."     DRAM; may be left out
    [link]        gb_per_s = 300     source = "..."     to the other devices, each way; may be left out
    [on_chip]     mb = 40            source = "..."     memory the tile model may use
    [vector]      tflops = 19.5      source = "..."     elementwise arithmetic
    [[peak]]      datatype = "bf16"  tflops = 312  holds = { bfp = 9, float = 16 }  source = "..."

`holds` says the widest operand of each format that the datatype multiplies exactly. A format that it does not name is
held where its significands are: those of a format with boxes as bfp's, others as fixed point's. Codes wider than that
are split: a product then takes as many passes as the parts of one operand times those of the other (16 x 2 bits on bf16
units: two), each exact, summed in fp32. Floats, and widths above 16 bits, which are kept as floats, are not split.
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.hardware.shipped import profile_names, profile_text
from costmodel.names import nearest
from dsq.formats import BFP, FORMATS, WIDEST, FixedPoint, Format, Identity


@dataclass(frozen=True)
class Peak:
    """A datatype's dense matrix rate."""

    datatype: str
    flops: float  #: floating or integer operations a second (a multiply-accumulate is two)
    holds: dict[str, int]  #: name of a format -> widest operand it multiplies exactly
    source: str

    def parts(self, operand: Format) -> int:
        """Into how many operands of its own it splits this one, exactly; 0: it cannot.

        A code splits into its significand's higher and lower bits, as 15 bits into 8 and 7; a float does not.
        """
        if self.holds.get(operand.name, 0) >= operand.bits:
            return 1
        alike = BFP.name if operand.box else FixedPoint.name
        significand = max(self.holds.get(operand.name, 0), self.holds.get(alike, 0)) - 1
        if isinstance(operand, Identity) or significand < 1:
            return 0
        parts = -(-operand.significand_bits // significand)
        return parts if operand.packs or parts == 1 else 0


@dataclass(frozen=True)
class Rate:
    """How a product of two operands runs: in so many exact passes of one unit."""

    peak: Peak
    passes: int  #: parts of the one operand times parts of the other; their products are summed

    @property
    def flops(self) -> float:
        """Operations a second of the product that is wanted, all its passes counted as one."""
        return self.peak.flops / self.passes

    def __str__(self) -> str:
        return f"{self.passes} x {self.peak.datatype}" if self.passes > 1 else self.peak.datatype


@dataclass(frozen=True)
class Hardware:
    name: str
    bandwidth: float  #: DRAM bytes a second
    on_chip_bytes: float
    vector_flops: float  #: elementwise operations a second
    peaks: tuple[Peak, ...]
    sources: dict[str, str]
    memory_bytes: float = 0  #: of DRAM; 0: not stated
    link: float = 0  #: bytes a second to the other devices, each way; 0: not stated

    def rate(self, first: Format, second: Format) -> Rate:
        """The fastest way to multiply two such operands exactly. Raises ValueError where there is none."""
        able = [Rate(peak, peak.parts(first) * peak.parts(second)) for peak in self.peaks]
        able = [rate for rate in able if rate.passes]
        if not able:
            wider = max(first, second, key=lambda operand: operand.bits)
            missing = f"{wider.name} operands of {wider.bits} bits"
            raise ValueError(f"hardware {self.name!r} has no peak that holds {missing}")
        return max(able, key=lambda rate: rate.flops)


def load_hardware(name: str) -> Hardware:
    """A named profile, or the TOML file at a path. Raises ValueError that names a missing or mistyped field."""
    known, path = profile_names(), Path(name)
    if name not in known and path.suffix != ".toml":
        accepted = f"profiles are {', '.join(known)}, or a .toml file"
        raise ValueError(f"unknown hardware {name!r}: nearest is {nearest(name, known)!r}; {accepted}")
    try:
        text = profile_text(name) if name in known else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"hardware file {name} cannot be read: {reason}") from None
    try:
        return _hardware(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"hardware file {name} is not TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"hardware file {name}: field {error}") from None


def _hardware(data: dict[str, Any]) -> Hardware:
    peaks = _field(data, "peak", list)
    if not peaks:
        raise ValueError("peak must list at least one datatype")
    parts = ["bandwidth", "on_chip", "vector", *(part for part in ("memory", "link") if part in data)]
    return Hardware(
        name=_field(data, "name", str),
        bandwidth=1e9 * _number(data, "bandwidth.gb_per_s"),
        on_chip_bytes=1e6 * _number(data, "on_chip.mb"),
        vector_flops=1e12 * _number(data, "vector.tflops"),
        peaks=tuple(_peak(entry, f"peak[{index}]") for index, entry in enumerate(peaks)),
        sources={part: _field(data, f"{part}.source", str) for part in parts},
        memory_bytes=1e9 * _number(data, "memory.gb") if "memory" in data else 0,
        link=1e9 * _number(data, "link.gb_per_s") if "link" in data else 0,
    )


def _peak(entry: Any, label: str) -> Peak:
    data, known = {label: entry}, (*FORMATS, Identity.name)
    holds = _field(data, f"{label}.holds", dict)
    for name, bits in holds.items():
        if name not in known or type(bits) is not int or not 1 <= bits <= WIDEST:
            raise ValueError(f"{label}.holds.{name} must be bits from 1 to {WIDEST} for one of {', '.join(known)}")
    datatype, source = (_field(data, f"{label}.{field}", str) for field in ("datatype", "source"))
    return Peak(datatype, 1e12 * _number(data, f"{label}.tflops"), holds, source)


def _field(data: Any, dotted: str, kind: type) -> Any:
    value = data
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{dotted} is missing")
        value = value[part]
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "text", list: "a list of tables ([[peak]])", dict: "a table"}
        raise ValueError(f"{dotted} must be {names[kind]}, not {value!r}")
    return value


def _number(data: Any, dotted: str) -> float:
    value = _field(data, dotted, object)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{dotted} must be a positive number, not {value!r}")
    return float(value)
