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


RUNS = """\
recipe,run,score,measure,levels,format,seed,dram,seconds,best_valid_loss
r,fp32_seed1,80.5,BLEU,none,,1,,60,2
r,fp32_seed2,90,BLEU,none,,2,,60,2
r,bfp_seed2,88,BLEU,"[4,4,4,16]",bfp,2,0.3,60,2
other,fp32_seed1,1,BLEU,none,,1,,60,2
"""
#: more rows: a second run at one level and format, and a recipe without runs in floating point
AMBIGUOUS = """\
r,bfp_box=8_seed2,87,BLEU,"[4,4,4,16]",bfp,2,0.3,60,2
plain,bfp_seed1,1,BLEU,"[4,4,4,16]",bfp,1,,,
"""
RISES = """\
recipe,run,score,levels,format,rise_at,seed
r,fp32_seed1,90,none,,,1
r,bfp_at0.12_seed1,80,"[2,2,2,16]",bfp,0.12,1
r,bfp_at0.8_seed1,60,"[2,2,2,16]",bfp,0.8,1
"""
RECIPE = """\
[data]
kind = "parallel"
path = "x"
[[runs]]
levels = "none"
paper = 30.0
[[runs]]
format = "bfp"
levels = "[4,4,4,16]"
paper = 29.0
[[runs]]
format = "bfp"
levels = "[2,2,2,16]"
paper = 29.0
"""


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of two recipes, and beside it the recipe that planned the runs of "r"."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "RECIPES", tmp_path)
    (tmp_path / "table.toml").write_text(RECIPE)
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


def test_a_table_follows_its_ledger(ledger: Path) -> None:
    assert cells("ledger ledger.csv r")[1:] == [
        ["fp32", "2", "85.2", "-", "-"],
        ["[4,4,4,16]", "1", "88.0", "-2.0", "0.3000"],
    ]


def test_a_table_of_some_of_the_runs_has_fp32_too(ledger: Path) -> None:
    ledger.write_text(RUNS + AMBIGUOUS)
    assert [row[0] for row in cells("ledger ledger.csv r bfp_box*")[1:]] == ["fp32", "[4,4,4,16]"]


def test_a_page_keeps_all_but_its_tables(ledger: Path) -> None:
    old = page("ledger ledger.csv r")
    written = results_page.written(old)
    assert written.startswith("Before.\n\n<!--")
    assert written.endswith("<!-- end -->\n\nAfter.\n")
    assert results_page.written(written) == written
    unclosed = old.replace("<!-- end -->", "")
    assert results_page.written(unclosed + old) == unclosed + written  # what is between the two tables stays


def test_the_papers_figures_beside_ours(ledger: Path) -> None:
    assert cells("paper ledger.csv r table")[1:] == [
        ["bfp", "[4,4,4,16]", "-1.00", "-2.00", "-2.00", "-2.00", "1"],
        ["bfp", "[2,2,2,16]", "-1.00", "-", "-", "-", "-"],
    ]


def test_runs_that_differ_in_their_rise_have_a_row_each(ledger: Path) -> None:
    ledger.write_text(RISES)
    levels = [row[1] for row in cells("paper ledger.csv r table")[1:]]
    assert levels[1:] == ["[2,2,2,16] at 0.12", "[2,2,2,16] at 0.8"]


def test_a_grid_of_losses_beside_fp32(ledger: Path) -> None:
    assert cells("grid ledger.csv r format levels bfp*") == [["format", "[4,4,4,16]"], ["bfp", "-2.0"]]
    assert results_page._cell([1.0, 2.0, 4.5]) == "+2.5 (+1.0..+4.5)"


PAPERS = """\
paper,table,model,data,setting,score,fp32,times
gact,3,GCN,Flickr,gact,51.08,51.17,7.93
mesa,7,DeiT,CIFAR,mesa,65.2,64.8,
"""


def test_the_suites_scores_stand_beside_a_papers(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        (task, setting, 1): {"loss": "1", "score": score, "held_mib": held, "cpu": "a"}
        for task, setting, score, held in (
            *(("gcn-cora", "fp32", "80", "18"), ("gcn-cora", "gact", "79.5", "3")),
            *(("sst2", "fp32", "70", "8"), ("sst2", "mesa", "60", "2")),
        )
    }
    monkeypatch.setattr(results_page, "_suite", lambda: Evidence(load_suite(), found))
    (ledger.parent / "papers.csv").write_text(PAPERS)
    head, *below = cells("beside gact gcn-cora,sst2 gact mesa")
    assert head == ["setting", "gcn-cora", "sst2", "paper: GCN, Flickr"]
    assert below == [["gact", "-0.50 (6.0 x)", "-", "-0.09 (7.9 x)"], ["mesa", "-", "-10.00 (4.0 x)", "-"]]
    assert [row[:2] for row in cells("evidence gact mesa over=sst2")[1:]] == [["mesa", "1"]]


@pytest.mark.parametrize(
    "words, message",
    [
        ("pie ledger.csv", "accepted are ledger, grid, paper, evidence, beside, file"),
        ("ledger ledger.csv", "table: ledger ledger.csv: missing a required argument: 'recipe'"),
        ("ledger ledger.csv x", "no run of 'x', only of r, other"),
        ("grid ledger.csv r format levels bfp*", "bfp_box=8 has no cell of its own at format bfp, levels "),
        ("grid ledger.csv r format levels sbfp*", r"no run of 'r' beside fp32 that matches sbfp\*"),
        ("grid ledger.csv r format size bfp*", "bfp has no cell of its own at format bfp, size None"),
        ("grid ledger.csv plain format levels *", "no run of 'plain' in floating point"),
        ("paper ledger.csv r table", r"bfp_box=8 has no row of its own at bfp \[4,4,4,16\]"),
        ("paper ledger.csv plain table", "no run of 'plain' in floating point"),
        ("file ledger.csv run speed", "has no column 'speed', but recipe, run, score"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(words: str, message: str, ledger: Path) -> None:
    ledger.write_text(RUNS + AMBIGUOUS)
    with pytest.raises(ValueError, match=message):
        results_page.written(page(words))
