"""docs/results.md and other pages: their tables are those of the files in analysis/results."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pandas")

from analysis import ROOT, results_page
from analysis.evidence.comparison import Evidence
from analysis.evidence.suite import load_suite


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_a_committed_page_is_what_the_command_writes(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert results_page.written(page) == page, "run python -m analysis.results_page"
    assert page.count("<!-- table: ") == page.count("<!-- end -->") >= 1
    for name in re.findall(r"\]\(\.\./(analysis/results/[\w.]+)\)", page):
        assert (ROOT / name).exists()


def test_the_figures_of_the_readme_are_the_ledgers() -> None:
    names = ["[8,4,8,8] all", "bf16 autocast", "[-,4,-,-] all, autocast"]
    ledger, readme = (
        _cells(results_page._evidence(results_page._suite(), *names)),
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    rows = {cells[0]: cells[1:] for cells in ledger}
    table = [cells for cells in _cells(readme.split("## Accuracy")[1]) if cells[1].isdigit()]
    names_of_times = ["bf16 autocast", "[8,4,8,8]", "[8,4,8,8] all"]
    times = {cells[0]: cells[6] for cells in _cells(results_page._evidence(results_page._suite(), *names_of_times))}
    for name, (_, *figures) in zip(names, table, strict=True):
        tasks, loss, _, _, saved, *_ = rows[name]
        assert figures[:3] == [tasks, loss, saved.split()[0]]
        assert name not in times or figures[3] == times[name]


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


RUNS = """\
recipe,run,score,seed
r,bfp_4_seed2,88,2
r,fp32_seed1,80.5,1
r,fp32_seed2,90,2
plain,bfp_seed2,1,2
"""
PAPERS = """\
paper,table,model,data,setting,score,fp32,times,task
dsq,1,transformer,IWSLT17,"bfp [4,4,4,16]",29,30,,
dsq,1,transformer,IWSLT17,"bfp [8,8,8,16]",,30,,sst2
gact,3,GCN,Flickr,gact,51.08,51.17,7.93,gcn-cora
gact,3,GCN,Flickr,mesa,51.00,51.17,,gcn-cora
mesa,7,DeiT,CIFAR,mesa,65.2,64.8,,sst2
"""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of runs, and the papers' figures."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    (tmp_path / "papers.csv").write_text(PAPERS)
    path = tmp_path / "ledger.csv"
    path.write_text(RUNS)
    return path


def page(words: str) -> str:
    return f"Before.\n\n<!-- table: {words} -->\nold\n<!-- end -->\n\nAfter.\n"


def cells(words: str) -> list[list[str]]:
    """The table that these words ask for, without the line under its head."""
    lines = [line for line in results_page.written(page(words)).splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [head, *rows]


def test_a_page_keeps_all_but_its_tables(ledger: Path) -> None:
    old = page("file ledger.csv run")
    written = results_page.written(old)
    assert written.startswith("Before.\n\n<!--")
    assert written.endswith("<!-- end -->\n\nAfter.\n")
    assert results_page.written(written) == written
    unclosed = old.replace("<!-- end -->", "")
    assert results_page.written(unclosed + old) == unclosed + written  # what is between the two tables stays


def test_the_suites_scores_stand_beside_a_papers(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        (task, setting, 1): {"loss": "1", "score": score, "saved_mib": held, "cpu": "a"}
        for task, setting, score, held in (
            *(("gcn-cora", "fp32", "80", "18"), ("gcn-cora", "gact", "79.5", "3")),
            *(("sst2", "fp32", "70", "8"), ("sst2", "mesa", "60", "2")),
        )
    }
    monkeypatch.setattr(results_page, "_suite", lambda: Evidence(load_suite(), results))
    head, *below = cells("beside gact gcn-cora,sst2 gact mesa")
    assert head == ["setting", "gcn-cora; paper: GCN, Flickr", "sst2"]
    assert below == [["gact", "-0.50 (6.0x); -0.09 (7.9x)", "-"], ["mesa", "-; -0.17", "-10.00 (4.0x)"]]
    failed = cells("beside dsq sst2 'bfp [8,8,8,16]'")  # of which the paper prints no score
    assert failed == [["setting", "sst2"], ["bfp [8,8,8,16]", "-"]]
    assert [row[:2] for row in cells("evidence gact mesa over=sst2")[1:]] == [["mesa", "1"]]


def test_columns_of_a_file_and_of_some_of_its_rows(ledger: Path) -> None:
    assert cells("file ledger.csv run score:.1f seed=2 recipe=r")[1:] == [
        ["bfp_4_seed2", "88.0"],
        ["fp32_seed2", "90.0"],
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        ("pie ledger.csv", "accepted are evidence, beside, recipes, file"),
        ("beside gact", "table: beside gact: missing a required argument: 'tasks'"),
        ("file ledger.csv run speed", "has no column 'speed', but recipe, run, score"),
        ("file ledger.csv run speed=2", "has no column 'speed', but recipe, run, score"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(words: str, message: str, ledger: Path) -> None:
    with pytest.raises(ValueError, match=message):
        results_page.written(page(words))
