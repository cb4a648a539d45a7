"""Two checkouts side by side: what differs is named, and a process runs on the dsq of the tree that is given."""

from pathlib import Path

import pytest

from analysis import ROOT, revisions

CHANGED = f"""import sys
sys.path.remove(sys.path[0])
sys.path.insert(0, {str(ROOT)!r})
del sys.modules["dsq"]
import dsq
right = dsq.quantize
dsq.quantize = lambda *given, **how: 2 * right(*given, **how)
"""


def test_what_a_changed_tree_changes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other dsq doubles what quantize gives, and packs as this one does."""
    (tmp_path / "dsq").mkdir()
    (tmp_path / "dsq" / "__init__.py").write_text(CHANGED)
    assert revisions.compare_bits(tmp_path, "pack sbfp") == 2
    said = capsys.readouterr().out.splitlines()
    assert [line.split(", first ")[0] for line in said[:2]] == [
        f"pack sbfp, {threads} threads: 192 of 960 differ" for threads in (1, 2)
    ]
    assert " quantize: " in said[0]
    assert said[2] == "2 of 2 cases differ, 1,920 digests"


def test_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--only '\^none' finds no case; cases are pack bfp, .*"):
        revisions.compare_bits(ROOT, "^none")
