"""docs/results.md and other pages: their tables are those of the files in analysis/results."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pandas")

from analysis import ROOT, results_page


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_a_committed_page_is_what_the_command_writes(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert results_page.written(page, pictures=False) == page, "run python -m analysis.results_page"
    assert page.count("<!-- table: ") == page.count("<!-- end -->") >= 1
    for name in re.findall(r"\]\(\.\./(analysis/results/[\w.]+)\)", page):
        assert (ROOT / name).exists()


README_LEDGERS = (("demo_formats", "demo_formats"), ("multi30k", "multi30k_schedules"))
#: the rows of the README's table
README_ROWS = (
    "fp32",
    "snvint_4-3-3-8_8-4-4-8_at0.8",
    "snvint_4-3-3-16_16-4-4-16_at0.8",
    "snvint_4-4-4-16",
    "bfp_4-4-4-16",
)


def test_the_table_of_the_readme_is_that_of_the_ledgers() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text[text.index("| BLEU |") :].splitlines()[2 : 2 + len(README_ROWS)]
    ledgers = [results_page._group(f"{name}.csv", recipe) for name, recipe in README_LEDGERS]
    for name, line in zip(README_ROWS, lines, strict=True):
        corpus, multi30k = (next(one for one in group if one.name == name) for group in ledgers)
        assert len(corpus.rows) == len(multi30k.rows) == 3
        bleu = [f"{one.mean('score'):.1f}" for one in (corpus, multi30k)]
        costs = ["", ""] if corpus.is_float else [f"{corpus.mean('arithmetic'):.3f}", f"{corpus.mean('dram'):.2f}"]
        assert [cell.strip() for cell in line.split("|")[2:6]] == bleu + costs


def test_a_table_follows_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "recipe,run,score,measure,levels,format,seed,dram,seconds,best_valid_loss\n"
    rows = ["r,fp32_seed1,80.5,BLEU,none,,1,,60,2", "r,fp32_seed2,90,BLEU,none,,2,,60,2"]
    rows += ['r,bfp_seed2,88,BLEU,"[4,4,4,16]",bfp,2,0.3,60,2', "other,fp32_seed1,1,BLEU,none,,1,,60,2"]
    (tmp_path / "ledger.csv").write_text(head + "\n".join(rows) + "\n")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "Before.\n\n<!-- table: ledger ledger.csv r -->\nold\n<!-- end -->\n\nAfter.\n"
    written = results_page.written(page)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in written.splitlines() if "|" in line]
    assert cells[2:] == [
        ["fp32", "2", "85.2", "9.5", "-", "2.000", "-"],
        ["[4,4,4,16]", "1", "88.0", "-", "-2.0", "2.000", "0.3000"],
    ]
    assert written.startswith("Before.\n\n<!--")
    assert written.endswith("<!-- end -->\n\nAfter.\n")
    assert results_page.written(written) == written
    unclosed = page.replace("<!-- end -->", "")
    assert results_page.written(unclosed + page) == unclosed + written  # what is between the two tables stays
    recipe = ['[data]\nkind = "generated"', '[[runs]]\nlevels = "none"\npaper = 30.0']
    recipe += [f'[[runs]]\nformat = "bfp"\nlevels = "[{bits},16]"\npaper = 29.0' for bits in ("4,4,4", "2,2,2")]
    (tmp_path / "table.toml").write_text("\n".join(recipe))
    monkeypatch.setattr(results_page, "RECIPES", tmp_path)
    paper = results_page.written(page.replace("ledger ledger.csv r", "paper ledger.csv r table"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in paper.splitlines() if "|" in line]
    assert cells[2:] == [
        ["bfp", "[4,4,4,16]", "-1.00", "-2.00", "-2.00", "-2.00", "1"],
        ["bfp", "[2,2,2,16]", "-1.00", "-", "-", "-", "-"],
    ]
    (tmp_path / "rises.csv").write_text(
        "recipe,run,score,levels,format,rise_at,seed\nr,fp32_seed1,90,none,,,1\n"
        + "".join(f'r,bfp_at{at}_seed1,{score},"[2,2,2,16]",bfp,{at},1\n' for at, score in ((0.12, 80), (0.8, 60)))
    )
    paper = results_page.written(page.replace("ledger ledger.csv r", "paper rises.csv r table"))
    assert [row.split("|")[2].strip() for row in paper.splitlines() if "| bfp" in row][1:] == [
        "[2,2,2,16] at 0.12",
        "[2,2,2,16] at 0.8",
    ]
    grid = results_page.written(page.replace("ledger ledger.csv r", "grid ledger.csv r format levels bfp*"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in grid.splitlines() if "|" in line]
    assert cells[::2] == [["format", "[4,4,4,16]"], ["bfp", "-2.0"]]
    assert results_page._cell([1.0, 2.0, 4.5]) == "+2.5 (+1.0 to +4.5, 3 seeds)"
    with (tmp_path / "ledger.csv").open("a") as file:
        file.write(
            'r,bfp_box=8_seed2,87,BLEU,"[4,4,4,16]",bfp,2,0.3,60,2\nplain,bfp_seed1,1,BLEU,"[4,4,4,16]",bfp,1,,,\n'
        )
    for words, message in (
        ("pie ledger.csv", "accepted are ledger, grid, paper, stash, file"),
        ("ledger ledger.csv", "table: ledger ledger.csv: missing a required argument: 'recipe'"),
        ("ledger ledger.csv x", "no run of 'x', only of r, other"),
        ("grid ledger.csv r format levels bfp*", "bfp_box=8 has no cell of its own at format bfp, levels "),
        ("grid ledger.csv r format levels sbfp*", r"no run of 'r' beside fp32 that matches sbfp\*"),
        ("grid ledger.csv r format size bfp*", "bfp has no cell of its own at format bfp, size None"),
        ("grid ledger.csv plain format levels *", "no run of 'plain' in floating point"),
        ("paper ledger.csv r table", r"bfp_box=8 has no row of its own at bfp \[4,4,4,16\]"),
        ("paper ledger.csv plain table", "no run of 'plain' in floating point"),
        ("file ledger.csv run speed", "has no column 'speed', but recipe, run, score"),
    ):
        with pytest.raises(ValueError, match=message):
            results_page.written(page.replace("ledger ledger.csv r", words))
