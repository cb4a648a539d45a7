"""What a command prints or writes: a table for people, JSON or CSV; files appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
NOTE_WIDTH = 120


@dataclass(frozen=True)
class Section:
    """A titled table: records carry full values under names that JSON and CSV keep; `shown` says which columns people
    see, and how."""

    key: str  #: its name in JSON
    title: str
    records: list[Record]
    shown: dict[str, str] = field(default_factory=dict)  #: column -> format spec; empty: all columns as they are


@dataclass(frozen=True)
class Report:
    """A command's answer. CSV holds `columns` where given, else the first section's records; JSON every section."""

    sections: list[Section]
    notes: list[str] = field(default_factory=list)
    facts: Record = field(default_factory=dict)  #: what was costed: workload, hardware, options
    columns: Any = None  #: name -> array, where CSV holds more rows than people are shown

    def table(self) -> str:
        from tabulate import tabulate

        parts = []
        for section in self.sections:
            specs = section.shown or dict.fromkeys(section.records[0] if section.records else [], "")
            rows = [[_cell(record.get(name), spec) for name, spec in specs.items()] for record in section.records]
            aligned = tabulate(
                rows,
                [name.replace("_", " ") for name in specs],
                disable_numparse=True,
                colalign=_alignment(section, specs),
            )
            parts.append(f"{section.title}\n\n{aligned}" if rows else f"{section.title}\n\n(nothing)")
        notes = [textwrap.fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n\n".join(parts + ["\n".join(notes)] * bool(notes)) + "\n"

    def json(self) -> str:
        data = {**self.facts, **{section.key: section.records for section in self.sections}, "notes": self.notes}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def csv(self) -> str:
        import pandas as pd

        return pd.DataFrame(self.columns or self.sections[0].records).to_csv(index=False)


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "-"
    return f"{value:{spec}}" if spec and not isinstance(value, str) else str(value)


def _alignment(section: Section, specs: dict[str, str]) -> list[str]:
    first = section.records[0] if section.records else {}
    return ["left" if isinstance(first.get(name), str) else "right" for name in specs]


def check_writable(path: str) -> None:
    """Raises ValueError, before any work is done, if a file could not be written there."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise ValueError(f"output {path} is a folder: name a file")
    if not folder.is_dir():
        raise ValueError(f"output {path} cannot be written: there is no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None


def write_whole(path: str, write: Callable[[str], None]) -> None:
    """Call `write` with a temporary name beside `path`, then rename: readers never see half a file.
    Raises ValueError."""
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".dsq-cost-") as folder:
            temporary = Path(folder) / target.name
            write(str(temporary))
            os.replace(temporary, target)
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None
