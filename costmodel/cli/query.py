"""The workload, hardware and precisions that the arguments of every command describe, and facts of them for answers."""

import argparse
from collections.abc import Iterable

from costmodel.cli.output import Record
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup, parse_setups
from costmodel.model.roofline import Floor
from costmodel.workloads.asked import asked


def workload_of(arguments: argparse.Namespace) -> Workload:
    return asked(**vars(arguments)).build()


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    return load_hardware(arguments.hardware, arguments.datasheet)


def setups_of(arguments: argparse.Namespace, texts: Iterable[str]) -> list[Setup]:
    """The precisions, each in its own format, or in that of the options. Raises ValueError."""
    return [setup for text in texts for setup in parse_setups(text, vars(arguments))]


def setup_of(arguments: argparse.Namespace, text: str) -> Setup:
    """The one precision of the text. Raises ValueError."""
    setups = setups_of(arguments, [text])
    if len(setups) > 1:
        raise ValueError(f"precision must be one here, as in [16,4,4,16], got {text!r}")
    return setups[0]


def facts(workload: Workload, hardware: Hardware | None = None) -> Record:
    known: Record = {"workload": workload.name, "tokens": workload.tokens, "parameters": workload.parameters}
    known |= {"macs": workload.macs, "source": workload.source}
    return known | (hardware_facts(hardware) if hardware else {})


def hardware_facts(hardware: Hardware) -> Record:
    return {"hardware": hardware.name, "rates": hardware.rates, "hardware_sources": hardware.sources} | {
        "peaks": {peak.datatype: {"tflops": peak.flops / 1e12, "source": peak.source} for peak in hardware.peaks}
    }


def times_note(hardware: Hardware) -> str:
    """Whether times are measured or estimated, and on what."""
    return f"times: {hardware.rates}."


def heading(workload: Workload, hardware: Hardware) -> str:
    return (
        f"{workload.name}: {workload.parameters:,} parameters, {workload.tokens:,} tokens a step, "
        f"{workload.macs / 1e9:,.1f} GMAC a step; on {hardware.name}"
    )


def floor_record(floor: Floor) -> Record:
    return {
        "gflop": floor.flops / 1e9,
        "flop_per_byte": floor.intensity,
        "ridge": floor.ridge if floor.compute_seconds else None,
        "bound": "memory" if floor.memory_bound else "compute",
        "floor_ms": floor.seconds * 1e3,
    }


#: options that change nothing in the paper profile, which costs linear layers and knows no hardware
IGNORED_BY_PAPER = (
    *("hardware", "datasheet", "gemms_only", "exclude", "freeze", "tied", "quantise_attention", "fused_attention"),
    *("eager_attention", "chunked_loss", "box_axis", "container"),
)


def check_paper(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option that would do nothing."""
    refuse_idle(arguments, IGNORED_BY_PAPER, "in the paper profile")


def refuse_idle(arguments: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Raises ValueError for an option of ``names`` that was given; they do nothing ``where``."""
    for name in names:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} does nothing {where}: leave it out")
