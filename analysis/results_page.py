"""The tables of docs/results.md and other pages, from the files in analysis/results.

    python -m analysis.results_page

A table stands between two comments of a page, of which the first says what it is:

    <!-- table: ledger multi30k.csv multi30k_schedules snvint* -->   a ledger's runs of a recipe, fp32 and those of such
                                                                   names (globs; none: all)
    <!-- table: grid ablations.csv ablations format box bfp_4-4-4-16* -->   scores minus fp32's of the runs of such
                                                                   names (globs): a row a format, a column a box;
                                                                   of several seeds the mean (lowest..highest)
    <!-- table: paper multi30k.csv multi30k_schedules iwslt17_table1 -->   the rows of a recipe that holds the paper's
                                                                   scores: what each loses to fp32, there and here
    <!-- table: evidence fp32 "[8,4,4,8]" -->   settings of the suite, over its tasks; "over=sst2,vit": over these
    <!-- table: beside gact gcn-cora,sst2 gact "gact 2" -->   scores minus fp32's by task, and by how much less is held
                                                                   (in brackets): the suite's, and those of a paper
    <!-- table: file format_errors.csv format bits error:.4f -->   columns of a file as they are
    <!-- end -->
"""

import csv
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from analysis import ROOT
from analysis.evidence.comparison import Evidence, over_tasks
from analysis.evidence.ledger import LEDGER, read_rows
from analysis.evidence.suite import load_suite
from analysis.experiments import report
from analysis.experiments.ledger import Configuration, configurations, read_ledger
from analysis.experiments.recipe import RECIPES, load_experiment
from analysis.experiments.train import FLOAT
from dsq.command import OneLineParser, guarded, table, write_text

PROG = "python -m analysis.results_page"
_DOCS = ("results", "ablations", "stash-policies", "formats")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS))
RESULTS = ROOT / "analysis" / "results"
_TABLE = re.compile(r"(<!-- table: (?P<words>[^\n]*) -->\n)(?:(?!<!-- table: ).)*?(<!-- end -->)", re.DOTALL)
#: columns that a ledger's table leaves out: the time, which other work on the machine decides too, and two more
_HIDDEN = ("minutes", "spread", "valid loss")


def written(page: str) -> str:
    """The page with its tables made anew. Raises ValueError for an unknown table."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_table(shlex.split(found['words']))}\n\n{found[3]}", page)


def _table(words: list[str]) -> str:
    kind, *given = words
    if kind not in _KINDS:
        raise ValueError(f"table: {' '.join(words)}: accepted are {', '.join(_KINDS)}")
    try:
        inspect.signature(_KINDS[kind]).bind(*given)
    except TypeError as error:
        raise ValueError(f"table: {' '.join(words)}: {error}") from None
    return _KINDS[kind](*given)


def _ledger(file: str, recipe: str, *globs: str) -> str:
    """``globs``: of runs."""
    group = _group(file, recipe)
    shown = [one for one in group if one.is_float or not globs or any(fnmatchcase(one.name, glob) for glob in globs)]
    return report.table_of(shown, markdown=True, hidden=_HIDDEN)


def _grid(file: str, recipe: str, down: str, across: str, *globs: str) -> str:
    """``down``, ``across``: the columns of the ledger that tell the table's rows and columns."""
    group, reference = _group_and_fp32(file, recipe)
    rows: dict[str, dict[str, Any]] = {}
    for one in group:
        if any(fnmatchcase(one.name, glob) for glob in globs) and one.differences(reference):
            name, column = one.first.get(down), one.first.get(across)
            if not name or not column or column in rows.get(name, ()):
                raise ValueError(f"{file}: {one.name} has no cell of its own at {down} {name}, {across} {column}")
            rows.setdefault(name, {down: name})[column] = _cell(one.differences(reference))
    if not rows:
        raise ValueError(f"{file}: holds no run of {recipe!r} beside fp32 that matches {' '.join(globs)}")
    names = sorted({name for row in rows.values() for name in row} - {down}, key=_numbers)
    return table(list(rows.values()), {down: "", **dict.fromkeys(names, "")}, markdown=True)


def _cell(differences: list[float]) -> str:
    """The mean, and, of several seeds, the lowest..highest."""
    mean = f"{fmean(differences):+.1f}"
    return mean if len(differences) == 1 else f"{mean} ({min(differences):+.1f}..{max(differences):+.1f})"


def _paper(file: str, recipe: str, published: str) -> str:
    """``published``: a recipe that holds the paper's scores; the runs of ``recipe`` at its levels stand beside."""
    group, reference = _group_and_fp32(file, recipe)
    printed = load_experiment(RECIPES / f"{published}.toml").runs
    best = next((row.paper for row in printed if row.options["levels"] == [FLOAT]), None)
    rows: list[dict[str, Any]] = []
    for row in printed:
        told: dict[str, Any] = {name: values[0] for name, values in row.options.items() if name in ("format", "levels")}
        if told["levels"] == FLOAT or "rise_at" in row.options:  # the paper's rise at a plateau
            continue
        ours = [one for one in group if told.items() <= one.first.items()]
        twice = [one.name for n, one in enumerate(ours) if _with_rise(one) in map(_with_rise, ours[:n])]
        if twice:
            raise ValueError(f"{file}: {twice[0]} has no row of its own at {told['format']} {told['levels']}")
        told["paper"] = row.paper - best if row.paper and best else None
        found = [told | {"levels": _with_rise(one)} | _losses(one.differences(reference)) for one in ours]
        rows += found or [told | _losses([])]
    return table(rows, {"format": "", "levels": "", "paper": "+.2f", **_LOSSES}, markdown=True)


def _with_rise(one: Configuration) -> str:
    """Levels, and when the second begins: of runs that differ in it alone each has a row."""
    levels, rise = one.first["levels"], one.first.get("rise_at")
    return f"{levels} at {rise}" if rise else levels


_LOSSES = {"here": "+.2f", "lowest": "+.2f", "highest": "+.2f", "seeds": ""}


def _losses(differences: list[float]) -> dict[str, Any]:
    if not differences:
        return dict.fromkeys(_LOSSES)
    values = (fmean(differences), min(differences), max(differences), len(differences))
    return dict(zip(_LOSSES, values, strict=True))


def _numbers(text: str) -> tuple[list[float], str]:
    """The order of levels, sizes and fractions: by their numbers."""
    return [float(number) for number in re.findall(r"[\d.]+", text)], text


def _group(file: str, recipe: str) -> list[Configuration]:
    groups = configurations(read_ledger(RESULTS / file))
    if recipe not in groups:
        raise ValueError(f"{file}: holds no run of {recipe!r}, only of {', '.join(groups)}")
    return groups[recipe]


def _group_and_fp32(file: str, recipe: str) -> tuple[list[Configuration], Configuration]:
    group = _group(file, recipe)
    reference = next((one for one in group if one.is_float), None)
    if reference is None:
        raise ValueError(f"{file}: holds no run of {recipe!r} in floating point to compare with")
    return group, reference


def _file(file: str, *columns: str) -> str:
    """``columns``: their names, and after a colon how numbers are written."""
    specs = {name: spec for name, _, spec in (column.partition(":") for column in columns)}
    with (RESULTS / file).open(newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        if absent := set(specs) - set(reader.fieldnames or ()):
            raise ValueError(f"{file}: has no column {min(absent)!r}, but {', '.join(reader.fieldnames or ())}")
        rows = [{name: _read(row[name], spec) for name, spec in specs.items()} for row in reader]
    return table(rows, specs, markdown=True)


def _suite() -> Evidence:
    suite = load_suite()
    return Evidence(suite, read_rows(LEDGER, suite))


def _evidence(*settings: str) -> str:
    """``settings``: their names, and "over=TASK,TASK" where the means are over these tasks alone."""
    over = [word.removeprefix("over=").split(",") for word in settings if word.startswith("over=")]
    return over_tasks(_suite(), [one for one in settings if not one.startswith("over=")], *over)


def _beside(paper: str, tasks: str, *settings: str) -> str:
    evidence = _suite()
    rows: dict[str, dict[str, Any]] = {name: {"setting": name} for name in settings}
    for name, row in rows.items():
        for task in tasks.split(","):
            held = evidence.shares(task, name, "held_mib")
            row[task] = _less(evidence.scores(task, name).text("+.2f"), 1 / held.mean if held.values else None)
    with (RESULTS / "papers.csv").open(newline="", encoding="utf-8") as text:
        for printed in csv.DictReader(text):
            if printed["paper"] == paper and printed["setting"] in rows:
                difference = f"{float(printed['score']) - float(printed['fp32']):+.2f}"
                column = f"paper: {printed['model']}, {printed['data']}"
                rows[printed["setting"]][column] = _less(difference, _read(printed["times"], ".2f"))
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return table(list(rows.values()), dict.fromkeys(names, ""), markdown=True)


def _less(score: str | None, times: Any) -> str | None:
    return f"{score} ({times:.1f} x)" if score and times else score


def _read(text: str, spec: str) -> str | float | None:
    return (float(text) if spec else text) if text else None


_KINDS: dict[str, Callable[..., str]] = {
    "ledger": _ledger,
    "grid": _grid,
    "paper": _paper,
    "evidence": _evidence,
    "beside": _beside,
    "file": _file,
}


def _write_pages() -> None:
    for page in PAGES:
        write_text(page, written(page.read_text(encoding="utf-8")))


def main(arguments: list[str] | None = None) -> int:
    OneLineParser(prog=PROG, description=__doc__.splitlines()[0]).parse_args(arguments)  # type: ignore[union-attr]
    return guarded(PROG, _write_pages)


if __name__ == "__main__":
    sys.exit(main())
