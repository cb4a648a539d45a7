"""Hooks of mkdocs (mkdocs.yml): the site carries the files outside of docs/ that its pages link to.

They lie in the site's folder repository/: Markdown as a page, all else as it is. mkdocs checks these links like those
between pages, and `make docs` fails on a dead one. A link to a folder becomes its text, as a site has no folders.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
CARRIED = "repository"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add every file that a page of docs/ links to, and those that the added pages link to."""
    pages = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for _, _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            uri = _uri(path)
            if path.is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
                pages += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to where the site has their files."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(f"{CARRIED}/") if uri.startswith(f"{CARRIED}/") else ROOT / "docs" / uri

    def moved(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups(default="")
        path = (source.parent / target).resolve()
        if path.is_dir():
            return text
        return f"{mark}[{text}]({os.path.relpath(_uri(path), os.path.dirname(uri) or '.')}{anchor})"

    return LINK.sub(moved, markdown)


def _uri(path: Path) -> str:
    """The place of a file among the site's sources."""
    place = path.relative_to(ROOT)
    return str(place.relative_to("docs")) if place.parts[0] == "docs" else f"{CARRIED}/{place}"
