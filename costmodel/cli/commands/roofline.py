"""dsq-cost roofline: intensity, bound and time of each class of operations, and the picture."""

import argparse

from costmodel.cli.answer import Answer, Record, Section, facts, floor_record, heading, named, setups_of
from costmodel.hardware.hardware import Hardware, Rate, load_hardware
from costmodel.model.methods import Setup
from costmodel.model.operations import Workload
from costmodel.model.roofline import ZERO, Floor, floors, rates
from costmodel.model.traffic import matmuls, transfers
from costmodel.workloads.named import asked
from dsq.command import write_whole

_SHOWN = {"setup": "", "class": "", "flop_per_byte": ",.1f", "runs_in": ""}
_SHOWN |= {"bound": "", "floor_ms": ",.1f", "of_time": ".1%", "of_roof": ".0%"}
_OF_ROOF = (
    "of roof: of what the fastest unit that the class runs on reaches at this intensity; less where products take "
    "several passes, or where some kernels wait for DRAM and others for units."
)


def run(arguments: argparse.Namespace) -> Answer:
    workload, hardware = asked(**vars(arguments)).build(), load_hardware(arguments.hardware)
    records: list[Record] = []
    notes = []
    for setup in setups_of(arguments, arguments.precision):
        found, note = _classes(workload, setup, hardware)
        records += found
        notes.append(note)
    if arguments.picture:
        from costmodel.cli.pictures.roofline import draw_roofline

        dots = [record for record in records if record["class"] != "total" and "tflops" in record]
        write_whole(arguments.picture, lambda path: draw_roofline(path, workload.name, hardware, dots))
    notes += [_OF_ROOF, f"times: {hardware.rates}."]
    section = Section("classes", heading(workload, hardware), records, _SHOWN)
    return Answer([section], notes, facts(workload, hardware))


def _classes(workload: Workload, setup: Setup, hardware: Hardware) -> tuple[list[Record], str]:
    """A record for each class of operations, and one for all; and a note of what bounds the step."""
    listed = matmuls(workload, setup)
    classes = floors(transfers(workload, setup), listed, hardware, setup.container_bits)
    total = sum(classes.values(), start=ZERO)
    records: list[Record] = []
    for name, floor in {**classes, "total": total}.items():
        used = rates(listed, name, hardware)
        record = named(setup) | {"class": name, **floor_record(floor), "runs_in": ", ".join(sorted(used))}
        record |= {"dram_MB": floor.bytes / 1e6, "of_time": floor.seconds / total.seconds}
        if floor.flops:
            record["tflops"] = floor.flops_per_second / 1e12
        if name != "total":
            record |= _roof(floor, list(used.values()), hardware)
        records.append(record)
    longest = max(classes, key=lambda name: classes[name].seconds)
    waits = "DRAM" if classes[longest].memory_bound else "arithmetic"
    share = classes[longest].seconds / total.seconds
    return records, f"{setup}: {longest} bounds the step, {share:.0%} of its time, and waits for {waits}."


def _roof(floor: Floor, used: list[Rate], hardware: Hardware) -> Record:
    """The fastest unit of a class, and the most that it reaches at the class's intensity."""
    peaks = {rate.peak.datatype: rate.peak.flops for rate in used} or {"vector": hardware.vector_flops}
    unit = max(peaks, key=lambda name: peaks[name])
    slope = hardware.bandwidth * floor.intensity
    roof = min(slope, peaks[unit])
    reached = floor.flops_per_second / roof if roof else None
    return {"roof": "DRAM" if slope < peaks[unit] else unit, "roof_tflops": roof / 1e12, "of_roof": reached}
