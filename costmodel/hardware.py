"""Hardware profiles: TOML data files (profiles/*.toml, or a user's own), each figure with its source.

    name = "..."
    [bandwidth]   gb_per_s = 2039    source = "..."     DRAM
    [on_chip]     mb = 40            source = "..."     memory the tile model may use
    [vector]      tflops = 19.5      source = "..."     elementwise arithmetic
    [[peak]]      datatype = "bf16"  tflops = 312  holds = { bfp = 9, float = 16 }  source = "..."

`holds` says the widest operand of each format that the datatype multiplies exactly.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.formats import KINDS, Bits
from costmodel.names import nearest
from costmodel.shipped import profile_names, profile_text

MAX_BITS = 32
WIDTHS = range(MAX_BITS + 1)


@dataclass(frozen=True)
class Peak:
    """A datatype's dense matrix rate."""

    datatype: str
    flops: float  #: floating or integer operations a second (a multiply-accumulate is two)
    holds: dict[str, int]  #: format kind -> widest operand it multiplies exactly
    source: str


@dataclass(frozen=True)
class Hardware:
    name: str
    bandwidth: float  #: DRAM bytes a second
    on_chip_bytes: float
    vector_flops: float  #: elementwise operations a second
    peaks: tuple[Peak, ...]
    sources: dict[str, str]

    def datatype(self, kind: str, bits: int) -> Peak:
        """The fastest datatype that multiplies `bits`-wide operands of the format exactly. Raises ValueError."""
        able = self._able(kind, bits)
        if not able:
            raise ValueError(f"hardware {self.name!r} has no peak that holds {kind} operands of {bits} bits")
        return max(able, key=lambda peak: peak.flops)

    def matrix_flops(self, kind: str, bits: Bits) -> Bits:
        """Peak rate for operands `bits` wide (the wider of the two); an array of widths gives an array of rates."""
        rates = np.array([max((peak.flops for peak in self._able(kind, m)), default=0.0) for m in WIDTHS])[bits]
        if not np.all(rates):
            self.datatype(kind, int(np.max(bits)))  # raises, saying what is missing
        return rates

    def _able(self, kind: str, bits: int) -> list[Peak]:
        return [peak for peak in self.peaks if peak.holds.get(kind, 0) >= bits]


def load_hardware(name: str) -> Hardware:
    """A named profile, or the TOML file at a path. Raises ValueError that names a missing or mistyped field."""
    if name in profile_names():
        return _parse(profile_text(name), f"profile {name}")
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(
            f"unknown hardware {name!r}: nearest is {nearest(name, profile_names())!r}; profiles are "
            f"{', '.join(profile_names())}, or a .toml file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {name} cannot be read: {_reason(error)}") from None
    return _parse(text, name)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _parse(text: str, where: str) -> Hardware:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"hardware file {where} is not TOML: {error}") from None
    peaks = _field(data, "peak", list, where)
    if not peaks:
        raise ValueError(f"hardware file {where}: field peak must list at least one datatype")
    return Hardware(
        name=_field(data, "name", str, where),
        bandwidth=1e9 * _number(data, "bandwidth.gb_per_s", where),
        on_chip_bytes=1e6 * _number(data, "on_chip.mb", where),
        vector_flops=1e12 * _number(data, "vector.tflops", where),
        peaks=tuple(_peak(entry, f"peak[{index}]", where) for index, entry in enumerate(peaks)),
        sources={part: _field(data, f"{part}.source", str, where) for part in ("bandwidth", "on_chip", "vector")},
    )


def _peak(entry: Any, label: str, where: str) -> Peak:
    data = {label: entry}
    holds = _field(data, f"{label}.holds", dict, where)
    for kind, bits in holds.items():
        if kind not in KINDS or not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_BITS:
            raise ValueError(
                f"hardware file {where}: field {label}.holds.{kind} must be bits from 1 to {MAX_BITS} "
                f"for one of {', '.join(KINDS)}"
            )
    return Peak(
        datatype=_field(data, f"{label}.datatype", str, where),
        flops=1e12 * _number(data, f"{label}.tflops", where),
        holds=holds,
        source=_field(data, f"{label}.source", str, where),
    )


def _field(data: Any, dotted: str, kind: type, where: str) -> Any:
    value = data
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"hardware file {where}: field {dotted} is missing")
        value = value[part]
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "text", list: "a list of tables ([[peak]])", dict: "a table"}
        raise ValueError(f"hardware file {where}: field {dotted} must be {names[kind]}, not {value!r}")
    return value


def _number(data: Any, dotted: str, where: str) -> float:
    value = _field(data, dotted, object, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"hardware file {where}: field {dotted} must be a positive number, not {value!r}")
    return float(value)
