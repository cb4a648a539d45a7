"""The answer of a command: a table for people, JSON or CSV."""

import json
import textwrap
from dataclasses import dataclass, field
from typing import Any

from dsq.command import as_csv, table

Record = dict[str, Any]
#: columns of a terminal
NOTE_WIDTH = 99
#: columns of a cell of text
CELL_WIDTH = 21


@dataclass(frozen=True)
class Section:
    """A titled table: records carry full values under names that JSON and CSV keep; `shown` says which columns people
    see, and how."""

    key: str  #: its name in JSON
    title: str
    records: list[Record]
    shown: dict[str, str] = field(default_factory=dict)  #: column -> format spec; empty: all columns as they are


@dataclass(frozen=True)
class Answer:
    """A command's answer. CSV holds the first section's records; JSON every section."""

    sections: list[Section]
    notes: list[str] = field(default_factory=list)
    facts: Record = field(default_factory=dict)  #: what was costed: workload, hardware, options
    lead: str = ""  #: what people read first

    def table(self) -> str:
        parts = [f"{textwrap.fill(s.title, NOTE_WIDTH)}\n\n{_narrow(s) or '(nothing)'}" for s in self.sections]
        notes = [textwrap.fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in self.notes]
        lead = [textwrap.fill(self.lead, NOTE_WIDTH)] if self.lead else []
        return "\n\n".join(lead + parts + ["\n".join(notes)] * bool(notes)) + "\n"

    def json(self) -> str:
        data = {**self.facts, **{section.key: section.records for section in self.sections}, "notes": self.notes}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def csv(self) -> str:
        return as_csv(self.sections[0].records, "")


def _wrapped(cell: object) -> object:
    """A long text over several lines."""
    return textwrap.fill(cell, CELL_WIDTH) if isinstance(cell, str) else cell


def _narrow(section: Section) -> str:
    """The section's table, each word of a column's name on a line of its own, columns as wide as what they hold."""
    import tabulate

    specs = section.shown or dict.fromkeys(section.records[0] if section.records else (), "")
    records = [{name.replace("_", "\n"): _wrapped(record.get(name)) for name in specs} for record in section.records]
    before, tabulate.MIN_PADDING = tabulate.MIN_PADDING, 0  # it would widen every column of numbers by two
    try:
        return table(records, {name.replace("_", "\n"): spec for name, spec in specs.items()})
    finally:
        tabulate.MIN_PADDING = before
