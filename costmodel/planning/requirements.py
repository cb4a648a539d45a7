"""What hardware would make a precision pay off: one property of the hardware changed at a time, until a step takes as
long (or as much energy) as under the setup that it is compared with.

A changed rate is that of a new unit, for the coded products of one pair of widths; bandwidth and on-chip memory change
for both setups, since both run on the hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from costmodel.hardware.hardware import Hardware
from costmodel.model.arithmetic import CostedMatMul, matmuls
from costmodel.model.energy import Energy, energy
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup, at_width
from costmodel.model.roofline import Floor, step_floor
from costmodel.model.traffic import Transfer, transfers
from dsq.formats import Format, Identity

#: factors that are tried, away from 1 in either direction, and how closely the one that is needed is found
FACTORS = tuple(2.0**power for power in range(1, 9))
HALVINGS = 10
#: stands for no limit
LIMIT = 2.0**20

Counted = tuple[list[Transfer], list[CostedMatMul]]
Pair = tuple[Format, Format]  # of operands


@dataclass(frozen=True)
class Contest:
    """A setup against another, on changing hardware."""

    workload: Workload
    setup: Setup
    against: Setup
    #: what each moves and multiplies, by on-chip memory, which is all it depends on
    _counted: dict[float, tuple[Counted, Counted]] = field(default_factory=dict, repr=False, compare=False)

    def times(self, hardware: Hardware) -> tuple[Floor, Floor]:
        """A step's time under the setup, and under the one that it is compared with."""
        mine, other = (
            step_floor(moved, listed, hardware, setup.container_bits)
            for setup, (moved, listed) in zip((self.setup, self.against), self._count(hardware), strict=True)
        )
        return mine, other

    def energies(self, hardware: Hardware) -> tuple[Energy, Energy] | None:
        """And its energy; None where the hardware does not state what it needs."""
        mine, other = (energy(moved, listed, hardware) for moved, listed in self._count(hardware))
        return (mine, other) if mine and other else None

    def speed(self, hardware: Hardware) -> float:
        """How many times as fast the setup is."""
        mine, other = self.times(hardware)
        return float(other.seconds / mine.seconds)

    def saving(self, hardware: Hardware) -> float:
        """How many times the energy the other takes. Raises ValueError where the hardware states none."""
        found = self.energies(hardware)
        if not found:
            raise ValueError(f"hardware {hardware.name!r} does not state the energies of a byte and of these products")
        return found[1].total / found[0].total

    def products(self) -> list[Pair]:
        """The distinct pairs of coded operands of the setup, the widest first."""
        pairs = {
            (max(matmul.m1, matmul.m2), min(matmul.m1, matmul.m2)): matmul.format
            for matmul in matmuls(self.workload, self.setup)
            if at_width(matmul.format, matmul.m1).packs and not isinstance(matmul.format, Identity)
        }
        return [(at_width(fmt, m1), at_width(fmt, m2)) for (m1, m2), fmt in sorted(pairs.items(), reverse=True)]

    def _count(self, hardware: Hardware) -> tuple[Counted, Counted]:
        size = hardware.on_chip_bytes
        if size not in self._counted:
            mine, other = (
                (transfers(self.workload, setup, size), matmuls(self.workload, setup))
                for setup in (self.setup, self.against)
            )
            self._counted[size] = mine, other
        return self._counted[size]


@dataclass(frozen=True)
class Property:
    """One property of the hardware, and the hardware with it multiplied by a factor."""

    name: str
    unit: str
    now: float
    change: Callable[[float], Hardware]
    falls: bool = False  #: it is a cost: less of it is better hardware


@dataclass(frozen=True)
class Requirement:
    """What is needed of one property alone."""

    property: Property
    factor: float | None  #: the nearest to 1 that reaches the goal; None: none does
    doubled: float  #: the gain when the property is twice as good
    limit: float  #: and without limit


def solve(gain: Callable[[Hardware], float], goal: float, properties: list[Property]) -> list[Requirement]:
    """What each property has to become, the others as they are, for `gain` to reach the goal."""
    found = []
    for one in properties:
        reached = partial(_gain_with, gain, one)
        doubled, limit = (1 / factor if one.falls else factor for factor in (2.0, LIMIT))
        found.append(Requirement(one, _nearest(reached, goal), reached(doubled), reached(limit)))
    return found


def _gain_with(gain: Callable[[Hardware], float], changed: Property, factor: float) -> float:
    return gain(changed.change(factor))


def _nearest(gain: Callable[[float], float], goal: float) -> float | None:
    """The factor nearest to 1, up or down, at which the gain reaches the goal."""
    if gain(1.0) >= goal:
        return 1.0
    for factor in (tried for step in FACTORS for tried in (step, 1 / step)):
        if gain(factor) < goal:
            continue
        short, enough = (factor / 2 if factor > 1 else factor * 2), factor
        for _ in range(HALVINGS):
            middle = (short * enough) ** 0.5
            short, enough = (short, middle) if gain(middle) >= goal else (middle, enough)
        return enough
    return None


def time_properties(contest: Contest, hardware: Hardware) -> list[Property]:
    """Rates of the coded products, each pair of widths and all together, bandwidth and on-chip memory."""
    pairs, found = contest.products(), []
    for pair in pairs:
        tera = hardware.rate(*pair).flops / 1e12
        found.append(Property(f"rate of {_widths(pair)}", "TFLOP/s", tera, partial(faster_units, hardware, [pair])))
    if len(pairs) > 1:
        found.append(Property("rates of all of them", "x", 1.0, partial(faster_units, hardware, pairs)))
    bandwidth, on_chip = partial(_times, hardware, "bandwidth"), partial(_times, hardware, "on_chip_bytes")
    found.append(Property("DRAM bandwidth", "GB/s", hardware.bandwidth / 1e9, bandwidth))
    found.append(Property("on-chip memory", "MB", hardware.on_chip_bytes / 1e6, on_chip))
    return found


def energy_properties(contest: Contest, hardware: Hardware) -> list[Property]:
    """Energies of the coded products, and of a byte."""
    pairs, found = contest.products(), []
    for pair in pairs:
        rate, change = hardware.rate(*pair), partial(thriftier_units, hardware, [pair])
        now = rate.passes * rate.peak.pj_per_mac
        found.append(Property(f"energy of {_widths(pair)}", "pJ/MAC", now, change, falls=True))
    if len(pairs) > 1:
        found.append(Property("energy of all of them", "x", 1.0, partial(thriftier_units, hardware, pairs), falls=True))
    byte = partial(_times, hardware, "dram_pj_per_byte")
    found.append(Property("energy of a DRAM byte", "pJ", hardware.dram_pj_per_byte, byte, falls=True))
    return found


def _widths(pair: Pair) -> str:
    return f"{pair[0].bits} x {pair[1].bits} bits"


def _times(hardware: Hardware, name: str, factor: float) -> Hardware:
    return replace(hardware, **{name: getattr(hardware, name) * factor})


def faster_units(hardware: Hardware, pairs: list[Pair], factor: float, energy: float = 1) -> Hardware:
    """The hardware with a unit for each pair of operands, so many times as fast as what serves it now, and a product at
    `energy` times the energy."""
    changed = hardware
    for pair in pairs:
        now = hardware.rate(*pair)
        unit = replace(
            now.peak,
            datatype=f"new {_widths(pair)}",
            flops=now.flops * factor,
            stated=0,  # it splits no wider codes
            pj_per_mac=now.passes * now.peak.pj_per_mac * energy,
            holds={pair[0].name: (pair[0].bits, pair[1].bits)},
        )
        place = changed.peaks.index(now.peak)  # of measured kernels the first that holds a product counts
        changed = replace(changed, peaks=(*changed.peaks[:place], unit, *changed.peaks[place:]))
    return changed


def thriftier_units(hardware: Hardware, pairs: list[Pair], factor: float) -> Hardware:
    """The same units, as fast as now, a product at `factor` times the energy."""
    return faster_units(hardware, pairs, 1, factor)
