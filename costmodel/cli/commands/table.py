"""dsq-cost table: the paper's tables beside ours."""

import argparse
from collections.abc import Iterable
from operator import attrgetter

from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import hardware_facts, hardware_of, refuse_idle, times_note
from costmodel.model.quantisation import Setup
from costmodel.paper import calibrated, published, tables
from costmodel.workloads.named import load_workload
from dsq.formats import BFP, WIDEST, FixedPoint, Format
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
        notes += [*_fit_notes(fits), _alternative_note()]
    facts: Record = {}
    if 7 in chosen:
        hardware = hardware_of(arguments)
        bounds = tables.table_7(hardware)
        title = f"Table 7: OPT-1.3B, 16-bit float, on {hardware.name}"
        sections.append(_section("table_7", title, bounds, _BOUND))
        notes += [*_bound_notes(bounds), times_note(hardware)]
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
    "verdict": ("verdict", None),
    "arith_residual": ("arithmetic_residual", None),
    "dram_residual": ("dram_residual", None),
}
_BOUND: Columns = {
    "class": ("cls", ""),
    "flop_per_byte": ("intensity", ".1f"),
    "ridge": ("ridge", ".1f"),
    "bound": ("bound", ""),
    "bound_paper": ("published_bound", ""),
    "latency_paper": ("published_share", ".2%"),
    "ours": ("share", ".2%"),
    "with_adam": ("share_with_update", ".2%"),
    "by_module": ("share_by_module", ".2%"),
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
    tested = [
        f"{entry.row.setup} {name} {published:.2f}, ours {ours:.4f} ({relative:+.1%})"
        for entry in distinct
        for name, role, published, ours, relative in (
            ("arithmetic", entry.arithmetic_role, entry.row.arithmetic, entry.arithmetic, entry.arithmetic_relative),
            ("dram", entry.dram_role, entry.row.dram, entry.dram, entry.dram_relative),
        )
        if role == "test"
    ]
    return (
        f"{len(static)} rows repeat {len(distinct)} setups, {len(roles)} figures: {roles.count('unit')} are 1 by "
        f"definition, {len(roles) - roles.count('unit') - len(tested)} chose an assumption of the model (`fits` names "
        f"it), {len(tested)} are left as a test: {'; '.join(tested)}. 0.4375 rounds to 0.44, not to the 0.45 published."
    )


def _contradiction(entry: tables.Compared) -> str:
    row = entry.row
    return (
        f"{row.dataset}, {row.method} {row.precision}: the published {row.dram:.2f}x contradicts the paper: "
        f"{row.contradicts}. Ours is {entry.dram:.4f}x; the difference is shown, not fitted."
    )


def _fit_notes(fits: list[tables.Fit]) -> list[str]:
    notes = [
        "level 1, level 2: a run wholly at that level. share: of the run's work at [16,4,4,16]. The two columns of "
        "each DSQ row ask for different shares, so no run of two levels gives both; a share below 0 means that a run "
        "wholly at [2,2,2,16] already costs more than published."
    ]
    notes += [
        f"{fit.row.dataset}: {fit.arithmetic.share:.1%} by arithmetic, {fit.dram.share:.1%} by DRAM; {fit.share:.1%} "
        "fits best."
        for fit in fits
    ]
    headline = fits[0]
    factor = FixedPoint.law.cost(16, 16) / headline.arithmetic.first
    notes.append(
        "A run of the two levels meets the headline only with about 0 % of its work at [16,4,4,16]; even there its "
        f"arithmetic is {headline.arithmetic.first / headline.arithmetic.published - 1:.0%} above the published "
        f"figure: {factor:.1f} x less than fixed-point 16, not {published.HEADLINE_ARITHMETIC} x."
    )
    notes.append(
        "IWSLT17's published figures are the headline's, before rounding: 0.25 / 20.95 and 0.50 / 2.55 (the "
        "introduction swaps those two factors)."
    )
    return notes


def _alternative_note() -> str:
    """Why 0.31 (IWSLT) and 0.32 (GLUE) are not told apart, with the figures that adding dw would give."""
    fixed, bfp = FixedPoint(WIDEST), BFP(WIDEST)
    first, second = published.DSQ_LEVELS
    tensors = (*calibrated.TENSORS, calibrated.WEIGHT_GRADIENT)

    def figures(precision: Precision, template: Format) -> str:
        workloads = (load_workload(name) for name in ("transformer_iwslt_de_en", "roberta_base_mnli"))
        return " and ".join(
            f"{calibrated.dram(workload, Setup(template, precision), tensors):.4f}" for workload in workloads
        )

    return (
        "Fixed [16,4,4,16] is published as 0.31x on IWSLT and 0.32x on GLUE. Ours is 0.3125x for every model, since "
        f"each shape crosses as often at q0 or q3 as at q1 or q2. Writing dw at q3 too would give "
        f"{figures(second, fixed)} (BFP {figures(second, bfp)}), closer, but {figures(first, bfp)} at [2,2,2,16], "
        "further from the DSQ rows; it is left out."
    )


def _bound_notes(bounds: list[tables.Bound]) -> list[str]:
    agree = sum(entry.bound == entry.published_bound for entry in bounds)
    return [
        f"Table 7: {agree} of {len(bounds)} bounds agree. Our shares are of the time floor of one 2048-token "
        "sequence. The paper does not say whether its own are measured or modelled, on what batch, with the "
        "optimiser or without, nor where attention's four projections and the output projection count. Those choices "
        "move the shares: `with adam` counts the update, in `other`; `by module` also counts those projections "
        "outside `fc`, which leaves it the MLP alone.",
        "A floor has no kernel launches, dropout or casts, which are memory-bound and lengthen `attention` and "
        "`other` but not `fc`.",
    ]
