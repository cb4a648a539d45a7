"""dsq-cost plan: does it fit, how fast is it, what bounds it."""

import argparse
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import facts, hardware_of, heading, setups_of, times_note, workload_of
from costmodel.hardware.hardware import Hardware
from costmodel.model.entries import CATEGORIES
from costmodel.model.memory import Method, peak_memory
from costmodel.model.operations import Workload
from costmodel.planning.batch import largest_batch
from costmodel.planning.methods import USUAL
from costmodel.planning.step import communication_bytes, packing_seconds, step_time
from costmodel.workloads.workload_file import is_workload
from dsq.arguments import whole_number
from dsq.command.files import write_whole
from dsq.command.readers import read_json

_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
GIGA = 1e9
#: the method of the picture, where no precision is given
PICTURED = "bf16"


def run(arguments: argparse.Namespace) -> Answer:
    workload, hardware = workload_of(arguments), hardware_of(arguments)
    devices = whole_number("devices", arguments.devices, 1)
    budget = _bytes(arguments.fit) if arguments.fit else hardware.memory_bytes
    if not budget:
        raise ValueError(f"hardware {hardware.name!r} does not state its memory: give --fit, as in --fit 80GB")
    if arguments.zero and devices == 1:
        raise ValueError(f"--zero {arguments.zero} does nothing on one device: give --devices, or leave it out")
    methods = [replace(method, zero=arguments.zero, devices=devices) for method in _methods(arguments)]

    @cache
    def build(sequences: int) -> Workload:
        return workload_of(argparse.Namespace(**vars(arguments) | {"sequences": sequences}))

    sized = not _states_its_sizes(arguments)
    records = [_record(workload, method, hardware, budget) for method in methods]
    if sized:
        for record, method in zip(records, methods, strict=True):
            record["largest_batch"] = largest_batch(build, method, budget)
    if arguments.picture:
        from costmodel.cli.pictures.memory import draw_memory

        drawn = methods[0] if arguments.precision else next(m for m in methods if m.name == PICTURED)
        title, memory = f"{workload.name}, {drawn.name}", peak_memory(workload, drawn)
        write_whole(arguments.picture, lambda path: draw_memory(path, title, memory, budget))
    shown = {"method": "", **dict.fromkeys(_SHORT.values(), ".2f"), "peak_GB": ".2f", "fits": ""}
    shown |= {"largest_batch": ","} if sized else {}
    times = {"method": "", "step_ms": ",.1f", "compute_ms": ",.1f", "packing_ms": ",.1f", "communication_ms": ",.1f"}
    times |= {"bound": "", "tokens/s": ",.0f"}
    return Answer(
        [
            Section("methods", heading(workload, hardware), records, shown),
            Section("time", "Time of a step", [{name: record[name] for name in times} for record in records], times),
        ],
        _notes(records, hardware, budget, devices, arguments.zero),
        facts(workload, hardware) | {"budget_bytes": budget, "devices": devices, "zero": arguments.zero},
    )


def _methods(arguments: argparse.Namespace) -> list[Method]:
    setups = setups_of(arguments, arguments.precision)
    return [Method(str(setup), setup) for setup in setups] or list(USUAL)


#: category -> its column
_SHORT = dict(
    zip(CATEGORIES, ("param_GB", "grad_GB", "optim_GB", "activ_GB", "stash_GB", "logits_GB", "temp_GB"), strict=True)
)


def _record(workload: Workload, method: Method, hardware: Hardware, budget: float) -> Record:
    memory, step = peak_memory(workload, method), step_time(workload, method, hardware)
    record: Record = {"method": method.name}
    record |= {_SHORT[name]: memory.categories[name] / GIGA for name in CATEGORIES}
    record |= {"peak_GB": memory.peak / GIGA, "fits": "yes" if memory.peak <= budget else "no"}
    record |= {"peak_at": memory.cause, "saved_GB": memory.saved / GIGA}
    record |= {"step_ms": step.seconds * 1e3, "compute_ms": (step.compute + step.update) * 1e3, "bound": step.bound}
    packing = packing_seconds(workload, method, hardware)
    record |= {"packing_ms": None if packing is None else packing * 1e3, "communication_ms": step.communication * 1e3}
    record |= {"communication_GB": communication_bytes(workload, method) / GIGA}
    return record | {"tokens/s": method.devices * workload.tokens / step.seconds}


def _notes(records: list[Record], hardware: Hardware, budget: float, devices: int, zero: int) -> list[str]:
    fitting = [record for record in records if record["fits"] == "yes"]
    notes = []
    if fitting:
        fastest = min(fitting, key=lambda record: float(record["step_ms"]))
        notes.append(f"In {budget / GIGA:,.1f} GB, {len(fitting)} of {len(records)} fit; fastest: {fastest['method']}.")
    else:
        least = min(records, key=lambda record: float(record["peak_GB"]))
        notes.append(
            f"None fits in {budget / GIGA:,.1f} GB; {least['method']} needs least, {least['peak_GB']:,.1f} GB."
        )
    peaks = dict.fromkeys(str(record["peak_at"]) for record in records)
    notes.append(f"the peak comes at the {'; '.join(peaks)}. fp32 master weights, gradients and moments of Adam.")
    if devices > 1:
        notes.append(f"{devices} devices, ZeRO {zero}: figures of one device; communication is not overlapped.")
    notes.append("memory: no fragmentation, no workspaces. batch: the most sequences a device that fit.")
    if any(record["packing_ms"] is None for record in records):
        notes.append("packing, -: never measured on this hardware, and not counted in the step.")
    notes.append(times_note(hardware))
    return notes


def _bytes(text: str) -> float:
    """'80GB' -> 80e9. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]i?B)", text)
    if not match or not float(match[1]):
        raise ValueError(f"fit must be a size such as 80GB or 24GiB, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def _states_its_sizes(arguments: argparse.Namespace) -> bool:
    """A workload file, whose batch cannot be changed."""
    return arguments.workload.endswith(".json") and is_workload(read_json(Path(arguments.workload)))
