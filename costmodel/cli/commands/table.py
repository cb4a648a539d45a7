"""dsq-cost table: the paper's tables beside ours, with the residual of every row (docs/cost-model.md explains them)."""

import argparse
from collections.abc import Iterable
from operator import attrgetter

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import hardware_facts, hardware_of, refuse_idle, times_note
from costmodel.model.quantisation import Setup
from costmodel.paper import published, tables
from dsq.formats import FixedPoint
from dsq.precision import Precision

TABLES = (1, 6, 7)


def run(arguments: argparse.Namespace) -> Answer:
    chosen = tuple(arguments.table or TABLES)
    unknown = [number for number in chosen if number not in TABLES]
    if unknown:
        raise ValueError(f"table must be one of {', '.join(map(str, TABLES))}, not {unknown[0]}")
    if 7 not in chosen:
        refuse_idle(arguments, ("hardware", "datasheet"), "without table 7")
    sections: list[Section] = []
    static, fits = tables.static_rows(chosen), tables.dsq_fits(chosen)
    for number in sorted({1, 6} & set(chosen)):
        title = f"Table {number} (x fixed-point 32; off: (ours - published) / published)"
        entries = (entry for entry in static if entry.row.table == number)
        sections.append(_section(f"table_{number}", title, entries, _STATIC))
    notes = [_what_is_tested(static)] if static else []
    notes += [_contradiction(entry) for entry in static if entry.row.contradicts]
    if fits:
        title = "Table 1, DSQ rows as runs of [2,2,2,16] then [16,4,4,16]"
        sections.append(Section("dsq_rows", title, [record for fit in fits for record in _fit(fit)], _FIT_SHOWN))
        notes += _fit_notes(fits)
    facts: Record = {}
    if 7 in chosen:
        hardware = hardware_of(arguments)
        bounds = tables.table_7(hardware)
        title = f"Table 7: OPT-1.3B, 16-bit float, on {hardware.name}; off: (ours - published) / published"
        sections.append(_section("table_7", title, bounds, _BOUND))
        notes += [_bound_note(bounds), times_note(hardware)]
        facts = hardware_facts(hardware)
    return Answer(sections, notes, facts)


#: column -> (attribute of the entry, format spec; None: not shown to people)
Columns = dict[str, tuple[str, str | None]]
_STATIC: Columns = {
    "dataset": ("row.dataset", ""),
    "setup": ("row.setup", ""),
    "arith_paper": ("row.arithmetic", ".2f"),
    "arith_ours": ("arithmetic", ".4f"),
    "arith_off": ("arithmetic_relative", "+.1%"),
    "arith_fits": ("arithmetic_role", ""),
    "dram_paper": ("row.dram", ".2f"),
    "dram_ours": ("dram", ".4f"),
    "dram_off": ("dram_relative", "+.1%"),
    "dram_fits": ("dram_role", ""),
    # for --json and --csv
    "method": ("row.method", None),
    "precision": ("row.precision", None),
    "arith_residual": ("arithmetic_residual", None),
    "dram_residual": ("dram_residual", None),
}
_BOUND: Columns = {
    "class": ("cls", ""),
    "flop_per_byte": ("intensity", ".1f"),
    "ridge": ("ridge", ".1f"),
    "bound_paper": ("published_bound", ""),
    "bound_ours": ("bound", ""),
    "share_paper": ("published_share", ".2%"),
    "share_ours": ("share", ".2%"),
    "off": ("relative", "+.1%"),
    "with_adam": ("share_with_update", ".2%"),
    "residual": ("residual", None),
}


def _section(key: str, title: str, entries: Iterable[object], columns: Columns) -> Section:
    def value(entry: object, attribute: str) -> object:
        found = attrgetter(attribute)(entry)
        return str(found) if isinstance(found, Precision | Setup) else found

    records = [{name: value(entry, attribute) for name, (attribute, _) in columns.items()} for entry in entries]
    return Section(key, title, records, {name: spec for name, (_, spec) in columns.items() if spec is not None})


_FIT_SHOWN = {"dataset": "", "column": "", "published": ".4f", "level_1": ".4f", "level_2": ".4f"}
_FIT_SHOWN |= {"share_alone": ".1%", "share_best": ".1%", "ours": ".4f", "off": "+.1%"}


def _fit(fit: tables.Fit) -> list[Record]:
    return [
        {
            "dataset": fit.row.dataset,
            "column": name,
            "published": column.published,
            "level_1": column.first,
            "level_2": column.second,
            "share_alone": column.share,
            "share_best": fit.share,
            "ours": column.at(fit.share),
            "residual": column.at(fit.share) - column.published,
            "off": column.at(fit.share) / column.published - 1,
        }
        for name, column in (("arithmetic", fit.arithmetic), ("dram", fit.dram))
    ]


def _what_is_tested(static: list[tables.Compared]) -> str:
    """How many figures are no repetition, how many of those chose a constant, how many are left to test the model."""
    distinct = {str(entry.row.setup): entry for entry in static if not entry.row.contradicts}.values()
    roles = [role for entry in distinct for role in (entry.arithmetic_role, entry.dram_role)]
    units, tests = roles.count("unit"), roles.count("test")
    return (
        f"{len(static)} rows repeat {len(distinct)} setups, {len(roles)} figures: {units} are 1 by definition, "
        f"{len(roles) - units - tests} chose a constant of the model (`fits` names it), {tests} are left as a test."
    )


def _contradiction(entry: tables.Compared) -> str:
    row = entry.row
    return (
        f"{row.dataset}, {row.method} {row.precision}: the published {row.dram:.2f}x contradicts the paper: "
        f"{row.contradicts}. Ours is {entry.dram:.4f}x; the difference is shown, not fitted."
    )


def _fit_notes(fits: list[tables.Fit]) -> list[str]:
    headline = fits[0]
    factor = FixedPoint.law.cost(16, 16) / headline.arithmetic.first
    return [
        "level 1, level 2: a run wholly at that level. share: of the run's work at [16,4,4,16]; below 0: a run wholly "
        "at [2,2,2,16] costs more than published already.",
        f"the headline's {published.HEADLINE_ARITHMETIC} x less arithmetic than fixed-point 16 is {factor:.1f} x here, "
        "even wholly at [2,2,2,16].",
    ]


def _bound_note(bounds: list[tables.Bound]) -> str:
    agree = sum(entry.bound == entry.published_bound for entry in bounds)
    worst = max(bounds, key=lambda entry: abs(entry.relative))
    updated = max(abs(entry.share_with_update / entry.published_share - 1) for entry in bounds)
    return (
        f"Table 7: the share of {worst.cls} is {worst.relative:+.0%} off; with Adam's update in `other` (`with adam`) "
        f"no share is more than {updated:.0%} off. {agree} of {len(bounds)} bounds agree. The paper does not say what "
        "its shares count."
    )
