"""dsq-cost solve: what hardware would make a precision pay off, and by how much."""

import argparse

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import facts, hardware_of, heading, setup_of, times_note, workload_of
from costmodel.model.energy import Energy
from costmodel.model.roofline import Floor
from costmodel.planning.requirements import (
    Contest,
    Property,
    Requirement,
    energy_properties,
    solve,
    time_properties,
)


def run(arguments: argparse.Namespace) -> Answer:
    workload, hardware = workload_of(arguments), hardware_of(arguments)
    setup, against = setup_of(arguments, arguments.precision), setup_of(arguments, arguments.relative_to)
    if not arguments.gain > 0:
        raise ValueError(f"gain must be above 0, got {arguments.gain:g}")
    contest = Contest(workload, setup, against)
    if not contest.products():
        raise ValueError(f"{setup} multiplies no codes: there is no unit to ask for")
    times, energies = contest.times(hardware), contest.energies(hardware)
    now = [
        _now(str(setup), times[0], times[1]) | (_energy_now(energies[0], energies[1]) if energies else {}),
        _now(str(against), times[1], times[1]) | (_energy_now(energies[1], energies[1]) if energies else {}),
    ]
    sections = [Section("now", heading(workload, hardware), now, _NOW)]
    required = solve(contest.speed, arguments.gain, time_properties(contest, hardware))
    title = f"Time: what alone makes {setup} {arguments.gain:g} x as fast as {against}"
    sections.append(Section("time", title, [_record(one) for one in required], _SHOWN))
    notes = [
        "needs: the nearest value, up or down; none: the goal is out of reach that way. x2, limit: the gain with the "
        "property twice as good, and without limit. a rate is that of a new unit for these coded products, narrower "
        "ones too; bandwidth and memory change for both setups, so that less bandwidth may help.",
        times_note(hardware),
    ]
    if energies:
        required = solve(contest.saving, arguments.gain, energy_properties(contest, hardware))
        title = f"Energy: what alone brings {setup} down to {1 / arguments.gain:.3g} x that of {against}"
        sections.append(Section("energy", title, [_record(one) for one in required], _SHOWN))
        notes.append(f"energy: DRAM and multiply-accumulates alone, estimated. {hardware.sources['energy']}")
    else:
        notes.append(f"{hardware.name} states no energy: dram_pj_per_byte, and pj_per_mac of each peak.")
    return Answer(sections, notes, facts(workload, hardware))


_NOW = {"setup": "", "ms": ",.1f", "compute_ms": ",.1f", "dram_ms": ",.1f", "bound": "", "gain": ".2f"}
_NOW |= {"joules": ".2f", "dram_J": ".2f", "products_J": ".2f", "energy_gain": ".2f"}
_SHOWN = {
    "property": "",
    "unit": "",
    "now": ",.4g",
    "needs": "",
    "factor": ".2f",
    "gain_x2": ".2f",
    "gain_limit": ".2f",
}


def _now(name: str, mine: Floor, other: Floor) -> Record:
    record: Record = {"setup": name, "ms": float(mine.seconds) * 1e3, "compute_ms": float(mine.compute_seconds) * 1e3}
    record |= {"dram_ms": float(mine.memory_seconds) * 1e3, "bound": "memory" if mine.memory_bound else "compute"}
    return record | {"gain": float(other.seconds / mine.seconds)}


def _energy_now(mine: Energy, other: Energy) -> Record:
    record: Record = {"joules": mine.total, "dram_J": mine.dram, "products_J": mine.products}
    return record | {"energy_gain": other.total / mine.total}


def _record(required: Requirement) -> Record:
    one: Property = required.property
    record: Record = {"property": one.name, "unit": one.unit, "now": one.now, "factor": required.factor}
    needs = {None: "none", 1.0: "as it is"}.get(required.factor, f"{one.now * (required.factor or 0):,.4g}")
    return record | {"needs": needs, "gain_x2": required.doubled, "gain_limit": required.limit}
