"""Tables of ledgers: python -m analysis.experiments.report LEDGER.csv ... [--out DIR]

A table a recipe, a row a configuration: the mean over seeds and the spread, the largest minus the smallest. Printed as
text and written as Markdown (report.md). An experiment that is half done reports what is there.
"""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from analysis.experiments.ledger import Configuration, Row, configurations, read_ledger
from dsq.command import OneLineParser, guarded, is_missing, make_folder, table, write_text

PROG = "python -m analysis.experiments.report"
#: columns of a ledger that tell a configuration, in the order of the table
_OPTIONS = (
    *("label", "format", "levels", "rise_at", "threshold", "lr_at_rise", "rounding", "box", "box_axis", "stash"),
    *("exclude", "tied", "attention", "fraction_bits", "units", "patience", "eval_full_precision"),
)
#: the columns that decide nothing but where a plateau ends a level
_AT_PLATEAUS = ("threshold", "patience")
COLUMNS = {"spread": ".1f", "minus fp32": "+.1f", "valid loss": ".3f", "arithmetic": ".4f", "DRAM": ".4f"}
COLUMNS |= {"stash / fp32": "", "minutes": ".1f"}


def records(group: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The rows of a recipe's table: the options that differ, seeds, the score by its name, and COLUMNS."""
    quantised = [one for one in group if not one.is_float]
    differing = [name for name in _OPTIONS if _differs(name, group if name == "label" else quantised)]
    differing = differing if "levels" in differing else ["levels", *differing]
    reference = next((one for one in group if one.is_float), None)
    ordered = sorted(group, key=lambda one: not one.is_float)
    return [_told(one, differing) | _figures(one, reference) for one in ordered]


def _differs(name: str, group: Sequence[Configuration]) -> bool:
    """Whether the option tells some of the configurations from others."""
    return len({_option(one, name) for one in group if name not in _AT_PLATEAUS or _waits(one)}) > 1


def _waits(one: Configuration) -> bool:
    """Whether a plateau ends a level."""
    return bool(one.first["levels"].count("[") > 1 and not one.first.get("rise_at"))


def _told(one: Configuration, names: Sequence[str]) -> dict[str, Any]:
    if one.is_float:
        return dict.fromkeys(names) | {names[0]: one.first.get(names[0]) if names[0] == "label" else one.format}
    return {name: _option(one, name) for name in names}


def _option(one: Configuration, name: str) -> str | None:
    """The option's value; None for a flag that was not given, and for _AT_PLATEAUS unless a plateau ends a level."""
    value = one.first.get(name)
    return None if value in ("", "False") or (name in _AT_PLATEAUS and not _waits(one)) else value


def _figures(one: Configuration, reference: Configuration | None) -> dict[str, Any]:
    scores = one.values("score")
    other = reference if one is not reference else None
    return {
        "seeds": len(scores),
        measure(one): one.mean("score"),
        "spread": max(scores) - min(scores) if len(scores) > 1 else None,
        "minus fp32": one.above(other) if other else None,
        "valid loss": one.mean("best_valid_loss"),
        "arithmetic": one.mean("arithmetic"),
        "DRAM": one.mean("dram"),
        "stash / fp32": _stash(one.first),
        "minutes": one.mean("seconds") / 60,
    }


def _stash(row: Row) -> str | None:
    """The measured stash of each level that was reached, as a share of fp32's; None where it was not measured."""
    pairs = zip((row.get("stash_bytes") or "").split(), (row.get("stash_bytes_fp32") or "").split(), strict=False)
    shares = ["-" if part == "-" else f"{float(part) / float(whole):.3f}" for part, whole in pairs]
    return ", ".join(shares) if set(shares) - {"-"} else None


def measure(one: Configuration) -> str:
    """The name of the score, as BLEU."""
    return one.first.get("measure") or "score"


def table_of(group: Sequence[Configuration], markdown: bool, hidden: Collection[str] = ()) -> str:
    """A recipe's table: the columns of ``records`` that any row has, but those ``hidden``."""
    rows = records(group)
    columns = dict.fromkeys(rows[0], "") | {measure(group[0]): ".1f"} | COLUMNS
    shown = {
        name: spec
        for name, spec in columns.items()
        if name not in hidden and not all(is_missing(row[name]) for row in rows)
    }
    return table(rows, shown, markdown)


def render(recipe: str, group: Sequence[Configuration], markdown: bool) -> str:
    heading = f"## {recipe}\n\n" if markdown else f"{recipe}\n\n"
    notes = "spread: largest minus smallest over seeds; minus fp32: of the same seeds and the same training."
    return f"{heading}{table_of(group, markdown)}\n\n{notes}\n"


def report(ledgers: Sequence[Path], out: Path) -> None:
    runs: dict[tuple[str, str], Row] = {}
    for row in (row for ledger in ledgers for row in read_ledger(ledger)):
        earlier = runs.setdefault(key := (row["recipe"], row["run"]), row)
        if earlier["score"] != row["score"]:
            print(f"{' '.join(key)}: {earlier['score']} in one ledger, {row['score']} in a later one, which counts\n")
        runs[key] = row
    rows = list(runs.values())
    if not rows:
        raise ValueError(f"{ledgers[0]}: holds no run yet")
    make_folder(out)
    groups = configurations(rows)
    for recipe, group in groups.items():
        print(render(recipe, group, markdown=False))
    write_text(out / "report.md", "\n".join(render(recipe, group, markdown=True) for recipe, group in groups.items()))
    print(out / "report.md")


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("ledgers", nargs="+", type=Path, metavar="LEDGER.csv")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for report.md (default: beside the ledger)")
    given = parser.parse_args(arguments)
    return guarded(PROG, lambda: report(given.ledgers, given.out or given.ledgers[0].parent))


if __name__ == "__main__":
    sys.exit(main())
