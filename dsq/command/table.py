"""Records as an aligned table for people, and as CSV for programs."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def table(records: Sequence[Record], columns: Mapping[str, str] | None = None, markdown: bool = False) -> str:
    """``records`` as text, a line each.

    ``columns``: the fields to show, in order, each with its format spec ("" as ``str`` writes it); without it, all
    fields of the first record. "-" stands for a field that is missing, None or NaN. Columns of text are aligned to the
    left, others to the right. ``markdown``: with the bars of a Markdown table.
    """
    from tabulate import tabulate  # not needed to parse a command line

    specs = dict.fromkeys(records[0] if records else (), "") if columns is None else columns
    text: str = tabulate(
        [[_cell(record.get(name), spec) for name, spec in specs.items()] for record in records],
        [name.replace("_", " ") for name in specs],
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=["left" if _is_text(records, name) else "right" for name in specs] if records else None,
    )
    return text


def _cell(value: Any, spec: str) -> str:
    if is_missing(value):
        return "-"
    return str(value) if isinstance(value, str) else f"{value:{spec}}" if spec else str(value)


def _is_text(records: Sequence[Record], name: str) -> bool:
    return isinstance(next((r[name] for r in records if not is_missing(r.get(name))), None), str)


def is_missing(value: Any) -> bool:
    """Whether ``value`` is None or NaN."""
    return value is None or value != value  # only NaN differs from itself


def as_csv(records: Sequence[Record], spec: str = ".6g") -> str:
    """``records`` as CSV with a head: every field that any of them has; empty where one lacks it, or it is None or NaN.

    ``spec``: the format of floats, "" for all their digits.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for record in records:
        values = [record.get(name) for name in names]
        writer.writerow(["" if is_missing(v) else f"{v:{spec}}" if isinstance(v, float) else v for v in values])
    return text.getvalue()
