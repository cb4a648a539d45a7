import dataclasses
import hashlib
from pathlib import Path

import pytest

from analysis.experiments import prepare


@pytest.fixture
def accept(monkeypatch: pytest.MonkeyPatch):
    """Takes a miniature for the archive of a corpus."""

    def accept(name: str, path: Path | None = None, **lines: int) -> None:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        small = dataclasses.replace(prepare.CORPORA[name], sha256=sha256, lines=lines)
        monkeypatch.setitem(prepare.CORPORA, name, small)

    return accept
