"""Two checkouts side by side: what differs is named, and a process runs on the dsq of the tree that is given."""

import json
from pathlib import Path

import pytest
import torch

from analysis import ROOT, revisions


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    new = {"a": {"y": "1", "dx": "2"}, "b": {"y": "3"}, "c": {"error": "raised E: bad"}}
    old = {"a": {"y": "1", "dx": "4"}, "b": {"y": "3"}, "c": {"y": "5"}}
    monkeypatch.setattr(revisions, "_run", lambda tree, *_: json.dumps(new if tree == ROOT else old))
    assert revisions.compare_bits(Path("other"), "") == 2
    assert capsys.readouterr().out.splitlines() == [
        "c: raised E: bad",
        "a: 1 of 2 differ, first dx: 4 -> 2",
        "c: 2 of 2 differ, first y: 5 -> none",
        "2 of 3 cases differ, 4 digests",
    ]


def test_a_digest_is_of_type_shape_and_values() -> None:
    x = torch.tensor([1.0, 2.0, torch.nan])
    others = [x.double(), x[None], -x, x.flip(0), x[:2]]
    assert len({revisions._digest(it) for it in (x, *others)}) == 6
    assert revisions._digest(x) == revisions._digest(torch.tensor([1.0, 2.0, -torch.nan]))


def test_a_process_runs_on_the_dsq_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "dsq").mkdir()
    (tmp_path / "dsq" / "__init__.py").write_text("raise RuntimeError('the other dsq')")
    with pytest.raises(ValueError, match=r"the process with the dsq of .* failed: (?s:.*)the other dsq"):
        revisions.compare_bits(tmp_path, "")


def test_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--only '\^none' finds no case; cases are pack bfp, .*"):
        revisions.compare_bits(ROOT, "^none")
