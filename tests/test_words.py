"""Pages, code and help texts use the field's words: none of banned_words.txt."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from dsq.config import DSQConfig
from dsq.costmodel.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("[!.]*/README.md"),
    ROOT / ".ci/README.md",
    ROOT / "dsq/__init__.pyi",
]
LINES = (ROOT / "tests/banned_words.txt").read_text(encoding="utf-8").splitlines()
BANNED = re.compile("|".join(f"(?:{line})" for line in LINES if not line.startswith("#")), re.IGNORECASE)


def banned(text):
    """The banned words of a text, each with what stands around it."""
    line = re.sub(r"bounding box(es)?", "", " ".join(text.split()))
    return [line[max(0, match.start() - 30) : match.end() + 30] for match in BANNED.finditer(line)]


CODE = sorted(
    path
    for folder in ("dsq", "kernels", "costmodel", "fairseq_plugin", "analysis", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".cpp", ".h", ".toml") and not any(parent.is_symlink() for parent in path.parents)
)
#: pronouns, adverbs and participles, which say of no variable what it is
NO_NOUNS = {
    *("it", "own", "ours", "mine", "each", "both", "others", "few", "more", "alone", "what", "here", "there", "then"),
    *("given", "fresh", "came", "listed", "stated", "found", "kept", "made", "known", "taken", "told", "said"),
    *("wanted", "begun", "chosen", "aside", "along", "alike", "beside", "beyond", "also"),
}
NAMED = [
    *(path for path in CODE if path.suffix == ".py" and path.parts[len(ROOT.parts)] not in ("analysis", "examples")),
    *(path for path in ROOT.glob("tests/**/*.py") if ROOT / "tests/costmodel" not in path.parents),
]
#: hints for users of other tools, who write their words
EXEMPT = {ROOT / "costmodel/cli/commands.toml"}


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in CODE}), ids=lambda folder: str(folder.relative_to(ROOT))
)
def test_code(folder):
    files = [path for path in CODE if path.parent == folder and path not in EXEMPT]
    results = {path.name: banned(path.read_text(encoding="utf-8")) for path in files}
    assert {name: words for name, words in results.items() if words} == {}


def test_variables_are_named_by_nouns():
    names = {}
    for path in NAMED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if assigned else node.arg if isinstance(node, ast.arg) else ""
            if name.strip("_") in NO_NOUNS:
                names[f"{path.relative_to(ROOT)}:{node.lineno}"] = name
    assert names == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page):
    assert banned(page.read_text(encoding="utf-8")) == []


def test_readme_and_docs_are_short():
    words = 0  # without tables and blocks of code
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        lines = [line.strip() for line in text.splitlines()]
        words += sum(len(line.split()) for line in lines if not line.startswith(("|", "<!--", ":::")))
    assert words <= 9_500, "say less elsewhere: what a table shows, what another page says, why it was made so"


@pytest.mark.parametrize("command", ["plan", "estimate", "table", "roofline", "calibrate", "trace"])
def test_help_of_dsq_cost(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert banned(capsys.readouterr().out) == []


@pytest.mark.parametrize("option", dataclasses.fields(DSQConfig), ids=lambda option: option.name)
def test_help_of_options(option):
    assert banned(f"{option.name} {option.metadata['help']}") == []


def test_a_banned_word_is_named_across_lines():
    assert banned("A bounding box.\nThe tensor is made\nagain here.") == ["A . The tensor is made again here."]
