"""What the arguments of every command describe: a workload, hardware, formats and precisions."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from costmodel.cli.format_options import template
from costmodel.cli.output import Record
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.operations import Workload
from costmodel.model.quantisation import Setup
from costmodel.model.roofline import Floor
from costmodel.workloads.named import load_workload
from dsq.precision import Precision, parse_named_levels


def workload_of(arguments: argparse.Namespace) -> Workload:
    fused = False if arguments.eager_attention or arguments.quantise_attention else arguments.fused_attention or None
    sizes = arguments.sequences, arguments.source_length, arguments.target_length
    workload = load_workload(arguments.workload, *sizes, fused)
    if arguments.quantise_attention:
        workload = _changed(workload, workload.quantising_attention(), "--quantise-attention")
    if arguments.exclude:
        whole, workload = workload, workload.excluding(arguments.exclude)
        if workload == whole:
            raise ValueError(f"exclude {arguments.exclude!r} matches none of the workload's converted layers")
    if arguments.freeze:
        workload = _changed(workload, workload.freezing(arguments.freeze), "--freeze")
    return workload.gemms_only() if arguments.gemms_only else workload


def _changed(before: Workload, after: Workload, option: str) -> Workload:
    """``after``. Raises ValueError where the option did nothing."""
    if after == before:
        raise ValueError(f"{option} does nothing for {before.name}: leave it out")
    return after


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    return load_hardware(arguments.hardware, arguments.datasheet)


def setups_of(arguments: argparse.Namespace, texts: Sequence[str]) -> list[Setup]:
    """Return the setups of all levels in ``texts``, each in its own format, or in that of the options."""
    return [
        described_setup({**vars(arguments), "format": name or arguments.format}, level)
        for name, levels in map(parse_named_levels, texts)
        for level in levels
    ]


def setup_of(arguments: argparse.Namespace, text: str) -> Setup:
    """Return the setup of the one level in ``text``. Raises ValueError where there are several."""
    setups = setups_of(arguments, [text])
    if len(setups) > 1:
        raise ValueError(f"precision must be one level here, as [16,4,4,16], got {text!r}")
    return setups[0]


def described_setup(described: Mapping[str, Any], precision: Precision) -> Setup:
    """The precision in the format, sizes, axis of boxes and container that `described` has, by the options' names."""
    fmt = template(described["format"], described)
    return Setup(fmt, precision, described["box_axis"], described.get("container") or 0)


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
        "gflop": float(floor.flops) / 1e9,
        "flop_per_byte": float(floor.intensity),
        "ridge": float(floor.ridge) if floor.compute_seconds else None,
        "bound": "memory" if floor.memory_bound else "compute",
        "floor_ms": float(floor.seconds) * 1e3,
    }


#: options that change nothing in the paper profile, which costs linear layers and knows no hardware
IGNORED_BY_PAPER = (
    "hardware",
    "gemms_only",
    "exclude",
    "freeze",
    "quantise_attention",
    "fused_attention",
    "eager_attention",
    "box_axis",
    "container",
    "datasheet",
)


def check_paper(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option that would do nothing."""
    refuse_idle(arguments, IGNORED_BY_PAPER, "in the paper profile")


def refuse_idle(arguments: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Raises ValueError for an option of ``names`` that was given; they do nothing ``where``."""
    for name in names:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} does nothing {where}: leave it out")
