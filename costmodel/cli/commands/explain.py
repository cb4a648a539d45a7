"""dsq-cost explain: one configuration, tensor by tensor."""

import argparse

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import facts, hardware_of, heading, setup_of, workload_of
from costmodel.model.traffic import Transfer, transfers
from dsq.arguments import pattern


def run(arguments: argparse.Namespace) -> Answer:
    workload, setup = workload_of(arguments), setup_of(arguments, arguments.precision)
    matched = pattern("operation", arguments.operation or "")
    hardware = hardware_of(arguments)
    moved = transfers(workload, setup, hardware.on_chip_bytes)
    whole = sum(float(transfer.total) for transfer in moved)
    records = [_record(transfer, whole) for transfer in moved if any(map(matched.search, transfer.group.names))]
    if not records:
        raise ValueError(f"operation {arguments.operation!r} matches none of the workload's operations")
    shown = {"layer": "", "tensor": "", "moved": "", "shape": "", "q": "", "bits": ""}
    shown |= {"total_MB": ",.1f", "share": ".2%"}
    total = sum(record["total"] for record in records)
    notes = [
        f"{setup}: {total:,} bytes shown of {whole:,.0f} a step.",
        "total: of the layers alike together, all their reads; a: the container width of tensors that no "
        "quantiser touches. --json and --csv also have bytes, exponents, and how often the tile model reads each.",
    ]
    return Answer([Section("tensors", heading(workload, hardware), records, shown)], notes, facts(workload, hardware))


def _record(transfer: Transfer, whole: float) -> Record:
    first, *rest = transfer.group.names
    alike = f" (+{len(rest)})" if rest else ""
    record: Record = {"operation": first, "alike": len(rest), "layer": _short(first, 25 - len(alike)) + alike}
    record |= {"tensor": transfer.tensor, "phase": transfer.phase, "direction": transfer.direction}
    record |= {"moved": f"{_PHASES[transfer.phase]} {transfer.direction}", "shape": "x".join(map(str, transfer.shape))}
    record |= {"q": transfer.width, "bits": transfer.bits, "times": transfer.times, "bytes": transfer.bytes}
    record |= {"exponents": transfer.scales, "count": transfer.group.count, "total": transfer.total}
    record |= {"total_MB": transfer.total / 1e6}
    return record | {"share": float(transfer.total) / whole}


_PHASES = {"forward": "fwd", "backward": "bwd", "update": "upd"}


def _short(name: str, most: int) -> str:
    """The name, its middle left out where it is longer than that."""
    return name if len(name) <= most else f"{name[: most // 3 - 1]}..{name[-(most - most // 3 - 1) :]}"
