"""The answer of a command: a table for people, JSON or CSV; and what all answers say of workload and hardware."""

import argparse
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq.command import as_csv, read_toml, table
from dsq.costmodel.hardware.hardware import Hardware
from dsq.costmodel.planning.plan import ASKED

Record = dict[str, Any]
_COLUMNS: dict[str, dict[str, str]] = read_toml(Path(__file__).with_name("columns.toml"))
#: facts that CSV has in each record, for files of a sweep to be joined
_SWEPT = ("workload", "tokens", "hardware", "buffer_bytes", *ASKED)
#: columns of a terminal
NOTE_WIDTH = 99
#: columns of a cell of text
CELL_WIDTH = 21


@dataclass(frozen=True)
class Section:
    """A titled table: records carry full values, as JSON and CSV have them."""

    key: str  #: its name in JSON
    title: str
    records: list[Record]
    columns: str  #: what people see of it: a table of columns.toml
    shown: Sequence[Record] = ()  #: the records that people see; none: all


@dataclass(frozen=True)
class Answer:
    """A command's answer. CSV holds the first section's records, with what was costed; JSON every section."""

    sections: list[Section]
    notes: list[str] = field(default_factory=list)
    facts: Record = field(default_factory=dict)  #: what was costed: workload, hardware, options
    lead: str = ""  #: what people read first
    legend: str = ""  #: and last

    def table(self) -> str:
        tables = [f"{textwrap.fill(s.title, NOTE_WIDTH)}\n\n{_narrow(s)}" for s in self.sections]
        notes = (textwrap.fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in (*self.notes, self.legend))
        parts = [textwrap.fill(self.lead, NOTE_WIDTH), *tables, "\n".join(filter(None, notes))]
        return "\n\n".join(filter(None, parts)) + "\n"

    def json(self) -> str:
        data = {**self.facts, **{section.key: section.records for section in self.sections}, "notes": self.notes}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def csv(self) -> str:
        swept = {name: self.facts[name] for name in _SWEPT if name in self.facts}
        return as_csv([swept | record for record in self.sections[0].records], "")


def _narrow(section: Section) -> str:
    """Return the section's table, each word of a column's name on a line of its own, columns as wide as what they
    hold."""
    import tabulate

    columns = {
        name: spec
        for name, spec in _COLUMNS[section.columns].items()
        if any(name in record for record in section.records)
    }
    heads = {name: name.replace("_", "\n") for name in columns}
    records = [
        {
            head: textwrap.fill(cell, CELL_WIDTH) if isinstance(cell := record.get(name), str) else cell
            for name, head in heads.items()
        }
        for record in section.shown or section.records
    ]
    before, tabulate.MIN_PADDING = tabulate.MIN_PADDING, 0  # it would widen every column of numbers by two
    try:
        return table(records, {heads[name]: spec for name, spec in columns.items()})
    finally:
        tabulate.MIN_PADDING = before


# ---- what the arguments of several commands describe


def refuse_idle(arguments: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Raise ValueError for an option of ``names`` that was given; they do nothing ``where``."""
    for name in names:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} does nothing {where}: leave it out")


def hardware_facts(hardware: Hardware) -> Record:
    return {
        "hardware": hardware.name,
        "rates": hardware.rates,
        "hardware_sources": hardware.sources,
        "word_bits": hardware.word,
        "peaks": {peak.datatype: {"tflops": peak.flops / 1e12, "source": peak.source} for peak in hardware.peaks},
    }
