"""The tables of docs/results.md and other pages, from the files in analysis/results.

    python -m analysis.results_page

A page's comments name its tables (analysis/tables.py): these, or those of docs/evidence.md (evidence/comparison.py).

    <!-- table: evidence fp32 "[8,4,4,8]" -->   settings of the suite, over its tasks; "over=sst2,vit": over these
    <!-- table: beside gact gcn-cora,sst2 gact "gact 2" -->   scores minus fp32's by task, and by how much less is saved
                                                                   (in brackets): the suite's; those of a paper
    <!-- table: setting-by-task wikitext2,vit hfp8 mxint8 -->   losses and scores minus fp32's: tasks, then settings
    <!-- table: recipes wikitext2,vit -->   the same of the suite's recipes, and what their authors published
    <!-- table: file format_errors.csv bits=4 format error:.4f -->   columns of a file; "bits=4": of such rows
    <!-- table: gpu-tasks "[8,4,8,8] all" -->   what settings lost on a GPU, by task (evidence_gpu.csv)
    <!-- table: estimates -->   times over compiled bf16's, and peaks, on a GPU (gpu_estimated.csv)
    <!-- table: options -->   the options of dsq.DSQConfig, from its fields
"""

import re
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from itertools import product
from typing import Any

from analysis import ROOT, tables
from analysis.evidence.comparison import PAGE, Evidence, by_setting, over_tasks, page_tables
from analysis.evidence.ledger import LEDGER, read_csv, read_rows
from analysis.evidence.steps import read_steps
from analysis.evidence.suite import load_suite
from dsq import recipes
from dsq.command import OneLineParser, guarded, table, write_text
from dsq.config import DSQConfig
from dsq.precision import levels_text

PROG = "python -m analysis.results_page"
_DOCS = ("results", "performance", "stash-policies", "formats", "mxfp4", "gpu", "config")
PAGES = (PAGE, *(ROOT / "docs" / f"{name}.md" for name in _DOCS))
RESULTS = ROOT / "analysis" / "results"
_LEVELS = re.compile(r'"?((?:\[[-\w,]+\] ?)*\[[-\w,]+\])"?')  #: brackets, which Markdown takes for links
_PROCESSES = {
    "Zen 5": ("process.csv", 1),
    "Zen 4": ("process_zen4.csv", 1),
    "Zen 4, two threads": ("process_zen4.csv", 2),
    "Xeon": ("process_intel.csv", 1),
}


def _file(file: str, *columns: str) -> str:
    """``columns``: their names, and after a colon how numbers are written; NAME=VALUE: of such rows alone."""
    conditions = dict(column.split("=") for column in columns if "=" in column)
    specs = {name: spec for name, _, spec in (column.partition(":") for column in columns if "=" not in column)}
    rows = read_csv(RESULTS / file)
    if absent := (set(specs) | set(conditions)) - set(rows[0]):
        raise ValueError(f"{file}: has no column {min(absent)!r}, but {', '.join(rows[0])}")
    rows = [row for row in rows if all(row[name] == value for name, value in conditions.items())]
    return table([{name: _read(row[name], spec) for name, spec in specs.items()} for row in rows], specs, markdown=True)


def _processors() -> str:
    """MiB and seconds of `analysis.bench process` where freed memory is given back, a column a processor."""
    rows: dict[str, dict[str, Any]] = {}
    for processor, (file, threads) in _PROCESSES.items():
        for row in read_csv(RESULTS / file):
            if row["setting"] == "first" and int(row["threads"]) == threads:
                cells = rows.setdefault(row["setup"], {"setup": row["setup"]})
                cells[processor] = f"{float(row['above MiB']):.0f}; {float(row['seconds']):.2f}"
    return table(list(rows.values()), dict.fromkeys(("setup", *_PROCESSES), ""), markdown=True)


def _estimates() -> str:
    """The time over compiled bf16's, and the peak in MiB: a design a row, a model a column."""
    rows: dict[str, dict[str, Any]] = {}
    for row in read_csv(RESULTS / "gpu_estimated.csv"):
        cells = rows.setdefault(row["design"], {"design, estimated": row["design"]})
        cells[f"{row['model']}, {row['tokens']}"] = f"{row['x compiled bf16']}; {int(row['peak MiB']):,}"
    return table(list(rows.values()), markdown=True)


def _options() -> str:
    """The fields of DSQConfig, a row each."""
    return table([_option(option) for option in fields(DSQConfig)], markdown=True)


def _option(option: Field[Any]) -> dict[str, str]:
    default, about = DSQConfig().as_dict()[option.name], option.metadata
    flag = "True, False" if about["kind"] is bool else about["metavar"]
    return {
        "option": f"`{option.name}`",
        "default": f"`{levels_text(DSQConfig().levels) if option.name == 'levels' else default}`",
        "accepted": ", ".join(about["choices"] or (flag,)),
        "meaning": _LEVELS.sub(r"`\1`", about["help"]),
    }


def _suite() -> Evidence:
    suite = load_suite()
    return Evidence(suite, read_rows(LEDGER, suite), read_steps())


def _evidence(evidence: Evidence, *settings: str) -> str:
    """``settings``: their names, and "over=TASK,TASK" where the means are over these tasks alone."""
    over = [word.removeprefix("over=").split(",") for word in settings if word.startswith("over=")]
    return over_tasks(evidence, [one for one in settings if not one.startswith("over=")], *over)


def _beside(evidence: Evidence, paper: str, tasks: str, *settings: str) -> str:
    """A cell has what was measured here; then what the paper prints of the model that stands for the task."""
    rows_of_papers = (row for row in read_csv(RESULTS / "papers.csv") if row["paper"] == paper and row["score"])
    printed = {(row["task"], row["setting"]): row for row in rows_of_papers}
    heads = {task: f"{task}; paper: {one['model']}, {one['data']}" for (task, _), one in printed.items()}
    rows: list[dict[str, Any]] = [{"setting": name} for name in settings]
    for row, task in product(rows, tasks.split(",")):
        saved = evidence.saved(task, row["setting"])
        cell = _less(evidence.scores(task, row["setting"]).text("+.2f"), 1 / saved.mean if saved.values else None)
        if one := printed.get((task, row["setting"])):
            difference = f"{float(one['score']) - float(one['fp32']):+.2f}"
            cell = f"{cell or '-'}; {_less(difference, _read(one['times'], '.2f'))}"
        row[heads.get(task, task)] = cell
    return table(rows, markdown=True)


def _recipes(evidence: Evidence, tasks: str) -> str:
    """``tasks``: joined by commas."""
    names = [name for name in recipes.names() if name in evidence.suite.settings]
    records = by_setting(evidence, tasks.split(","), ["bf16 autocast", *names])
    for record in records:
        record["published"] = recipes.recipe(record["setting"]).result if record["setting"] in names else ""
    return table(records, markdown=True)


def _less(score: str | None, times: Any) -> str | None:
    return f"{score} ({times:.1f}x)" if score and times else score


def _read(text: str, spec: str) -> str | float | None:
    return (float(text) if spec else text) if text else None


def written(page: str) -> str:
    """Return the page with new tables. Raises ValueError for an unknown table."""
    evidence = _suite()
    kinds: dict[str, Callable[..., str]] = {"evidence": partial(_evidence, evidence)}
    kinds |= {"beside": partial(_beside, evidence), "recipes": partial(_recipes, evidence)}
    kinds |= {"file": _file, "processors": _processors, "estimates": _estimates, "options": _options}
    on_gpu = Evidence(evidence.suite, read_rows(RESULTS / "evidence_gpu.csv", evidence.suite))
    kinds["gpu-tasks"] = page_tables(on_gpu)["tasks"]
    return tables.written(page, kinds | page_tables(evidence))


def _write_pages() -> None:
    for page in PAGES:
        write_text(page, written(page.read_text(encoding="utf-8")))


def main(arguments: list[str] | None = None) -> int:
    OneLineParser(prog=PROG, description=__doc__.splitlines()[0]).parse_args(arguments)  # type: ignore[union-attr]
    return guarded(PROG, _write_pages)


if __name__ == "__main__":
    sys.exit(main())
