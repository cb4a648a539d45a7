"""Every file that a page, a comment or a docstring names by its path is there, and every place of a link."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dsq", "kernels", "costmodel", "fairseq_plugin", "analysis", "docs", "examples", "tests")
NAMED = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w/]+\.(?:py|md|toml|cpp|h|json|csv|png))\b")


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_named_files_are_there(folder):
    pages = (ROOT / folder).glob("*.md" if folder == "." else "**/*.*")
    texts = {page: page.read_text() for page in pages if page.suffix in (".py", ".md", ".h", ".cpp", ".toml")}
    named = [(page, name) for page, text in texts.items() for name in NAMED.findall(text) if "NAME" not in name]
    missing = [f"{page.relative_to(ROOT)}: {name}" for page, name in named if not (ROOT / name).exists()]
    assert missing == []


LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page):
    """The anchors of a page's headings, as forges and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_of_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).glob("**/*.md"))]
    broken = []
    for page in pages:
        for target, anchor in LINK.findall(page.read_text()):
            place = page.parent / target if target else page
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []
