"""dsq-cost table: the paper's tables beside ours, with the residual of every row (docs/cost-model.md explains them)."""

import argparse

from dsq.costmodel.cli.answer import Answer, Record, Section, hardware_facts, refuse_idle
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.paper import tables

TABLES = (1, 6, 7)
_OFF = "off: (ours - published) / published"
_SHARES = (
    "level 1, level 2: a run wholly at that level. share: of the run's work at [16,4,4,16]; below 0: a run wholly at "
    "[2,2,2,16] costs more than published already."
)


def table(arguments: argparse.Namespace) -> Answer:
    numbers = tuple(arguments.table or TABLES)
    unknown = [number for number in numbers if number not in TABLES]
    if unknown:
        raise ValueError(f"table must be one of {', '.join(map(str, TABLES))}, not {unknown[0]}")
    if 7 not in numbers:
        refuse_idle(arguments, ("hardware",), "without table 7")
    sections: list[Section] = []
    static: list[Record] = []
    for number in sorted({1, 6} & set(numbers)):
        title = f"Table {number} (x fixed-point 32; {_OFF})"
        sections.append(Section(f"table_{number}", title, tables.static_rows(number), "static"))
        static += sections[-1].records
    notes = [
        "{dataset}, {method} {precision}: the published {dram_paper:.2f}x contradicts the paper: {contradicts}. Ours "
        "is {dram_ours:.4f}x; the difference is shown, not fitted.".format_map(record)
        for record in static
        if record["contradicts"]
    ]
    if static:
        notes.insert(0, _fitted(static))
    if 1 in numbers:
        title = "Table 1, DSQ rows as runs of [2,2,2,16] then [16,4,4,16]"
        sections.append(Section("dsq_rows", title, tables.dsq_rows(), "dsq_rows"))
        notes.append(_SHARES)
        title = "Others' chips: cost of a multiply-accumulate, over that in another format"
        sections.append(Section("silicon", title, tables.silicon_rows(), "silicon"))
    facts: Record = {}
    if 7 in numbers:
        hardware = load_hardware(arguments.hardware)
        title = f"Table 7: OPT-1.3B, 16-bit float, on {hardware.name}; {_OFF}"
        sections.append(Section("table_7", title, tables.table_7(hardware), "table_7"))
        notes.append(f"with adam: shares of a step whose rest is the update. times: {hardware.rates}.")
        facts = hardware_facts(hardware)
    return Answer(sections, notes, facts)


def _fitted(static: list[Record]) -> str:
    """Return the figures that test the model, each named once."""
    names = {"arith": "arithmetic", "dram": "DRAM"}
    tests = dict.fromkeys(
        f"{names[column]} of {record['setup']}"
        for record in static
        for column in names
        if record[f"{column}_fits"] == "test"
    )
    return (
        f"{len(tests)} figures, which rows repeat, test the model: {', '.join(tests)}. fits: the assumption of the "
        "model that a figure chose (docs/cost-model.md); excluded: as the paper contradicts it."
    )
