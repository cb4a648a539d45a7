"""Every file of this repository that a page, a comment or a docstring names by its path from the root is there."""

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
