"""dsq-cost explain: one configuration, tensor by tensor."""

from __future__ import annotations

import argparse
import re

from costmodel import paper
from costmodel.arithmetic import LAWS
from costmodel.commands.query import check_paper, facts, format_of, heading, setups_of, workload_of
from costmodel.formats import Format, Precision
from costmodel.hardware import load_hardware
from costmodel.operations import Workload
from costmodel.output import Record, Report, Section
from costmodel.traffic import charges


def run(arguments: argparse.Namespace) -> Report:
    workload = workload_of(arguments)
    ((fmt, precision),) = setups_of([arguments.precision], format_of(arguments))
    try:
        pattern = re.compile(arguments.operation or "")
    except re.error as error:
        raise ValueError(f"operation {arguments.operation!r} is not a regular expression: {error}") from None
    if arguments.profile == "paper":
        check_paper(arguments)
        return _explain_paper(workload, fmt, precision)
    hardware = load_hardware(arguments.hardware)
    found = charges(workload, precision, fmt, hardware.on_chip_bytes)
    whole = sum(float(charge.total) for charge in found)
    records: list[Record] = []
    for charge in found:
        names = charge.group.names
        if not any(map(pattern.search, names)):
            continue
        records.append(
            {
                "operation": names[0] if len(names) == 1 else f"{names[0]} (+{len(names) - 1} alike)",
                "tensor": charge.tensor,
                "phase": charge.phase,
                "moved": charge.direction,
                "shape": "x".join(map(str, charge.shape)),
                "q": charge.width,
                "bits": int(charge.bits),
                "times": charge.times,
                "bytes": int(charge.bytes),
                "exponents": int(charge.exponents),
                "count": charge.group.count,
                "total": int(charge.total),
                "share": float(charge.total) / whole,
            }
        )
    if not records:
        raise ValueError(f"operation {arguments.operation!r} matches none of the workload's operations")
    shown = dict.fromkeys(records[0], "") | {"bytes": ",", "exponents": ",", "total": ",", "share": ".2%"}
    total = sum(record["total"] for record in records)
    notes = [
        f"{fmt.kind} {precision}: {total:,} bytes shown of {whole:,.0f} a step.",
        "bytes: one operation, all its reads; exponents: the part of them that box storage adds; times: how often "
        "the tile model reads it; a: the container width of tensors that no quantiser touches.",
    ]
    return Report([Section("tensors", heading(workload, hardware), records, shown)], notes, facts(workload, hardware))


def _explain_paper(workload: Workload, fmt: Format, precision: Precision) -> Report:
    moved = paper.moved(workload, precision, fmt)
    whole = sum(float(entry.bytes) for entry in moved)
    tensors: list[Record] = [
        {
            "tensor": entry.tensor.name,
            "phase": entry.tensor.phase,
            "moved": entry.tensor.direction,
            "q": entry.tensor.width,
            "values": entry.values,
            "bits_a_value": float(entry.bits_a_value),
            "bytes": float(entry.bytes),
            "share": float(entry.bytes) / whole,
            "source": entry.tensor.source,
        }
        for entry in moved
    ]
    law = LAWS[fmt.kind]
    products: list[Record] = [
        {
            "product": product.name,
            "widths": " x ".join(str(getattr(precision, width)) for width in product.widths),
            "cost": float(law.cost(*(getattr(precision, width) for width in product.widths))),
            "source": product.source,
        }
        for product in paper.PRODUCTS
    ]
    shown = dict.fromkeys(tensors[0], "") | {"values": ",", "bits_a_value": "g", "bytes": ",.0f", "share": ".1%"}
    shown_products = dict.fromkeys(products[0], "") | {"cost": ".4f"}
    notes = [f"cost = K (m1 m2)^p, K = {law.K:.4g}, p = {law.p}: {law.source}"]
    sections = [
        Section(
            "tensors", f"{workload.name}, paper profile, {fmt.kind} {precision}: linear layers' tensors", tensors, shown
        ),
        Section(
            "products", "Products, relative to a fixed-point 32 x 32 multiply-accumulate", products, shown_products
        ),
    ]
    return Report(sections, notes, facts(workload))
