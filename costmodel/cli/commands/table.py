"""dsq-cost table: the paper's tables beside ours, with the residual of every row (docs/cost-model.md explains them)."""

import argparse

from dsq.costmodel.cli.answer import Answer, Record, Section, hardware_facts, refuse_idle
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.names import refuse
from dsq.costmodel.paper import tables

TABLES = (1, 6, 7)
_OFF = "off: (ours - published) / published"
_SHARES = (
    "level 1, level 2: a run wholly at that level. share: of the run's work at [16,4,4,16]; below 0: a run wholly at "
    "[2,2,2,16] costs more than published already."
)
_CONTRADICTED = (
    "{dataset}, {method} {precision}: the published {dram_paper:.2f}x contradicts the paper: {contradicts}. Ours is "
    "{dram_ours:.4f}x; the difference is shown, not fitted."
)


def table(arguments: argparse.Namespace) -> Answer:
    numbers = tuple(arguments.table or TABLES)
    for number in numbers:
        refuse((number not in TABLES, f"table must be one of {', '.join(map(str, TABLES))}, not {number}"))
    if 7 not in numbers:
        refuse_idle(arguments, ("hardware",), "without table 7")
    rows = {number: tables.static_rows(number) for number in (1, 6) if number in numbers}
    static = [record for records in rows.values() for record in records]
    sections = [
        Section(f"table_{number}", f"Table {number} (x fixed-point 32; {_OFF})", records, "static")
        for number, records in rows.items()
    ]
    notes = [
        *([_fitted(static)] if static else []),
        *(_CONTRADICTED.format_map(record) for record in static if record["contradicts"]),
    ]
    facts: Record = {}
    if 1 in numbers:
        runs = "Table 1, DSQ rows as runs of [2,2,2,16] then [16,4,4,16]"
        chips = "Others' chips: cost of a multiply-accumulate, over that in another format"
        sections += [
            Section("dsq_rows", runs, tables.dsq_rows(), "dsq_rows"),
            Section("silicon", chips, tables.silicon_rows(), "silicon"),
        ]
        notes.append(_SHARES)
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
