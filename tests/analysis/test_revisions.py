"""The comparison of two checkouts names what differs, and each process runs the dsq of its own tree."""

from pathlib import Path

import pytest
import torch

from analysis import ROOT, revisions


def test_what_differs_is_named(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dsq").mkdir()
    new = ["a\ty\t1", "a\tdx\t2", "b\ty\t3", "c\terror\tKeyError"]
    old = ["a\ty\t1", "a\tdx\t4", "b\ty\t3", "c\ty\t5"]
    monkeypatch.setattr(revisions, "_digests_of", lambda tree: new if tree == ROOT else old)
    assert revisions.compare(tmp_path) == 2
    assert capsys.readouterr().out.splitlines() == ["a dx 2", "c error KeyError", "2 setups differ, of 4 digests"]


def test_a_digest_is_of_type_shape_and_values() -> None:
    x = torch.tensor([1.0, 2.0, torch.nan])
    others = [x.double(), x[None], -x, x.flip(0), x[:2]]
    assert len({revisions.digest(it) for it in (x, *others)}) == 6
    assert revisions.digest(x) == revisions.digest(torch.tensor([1.0, 2.0, -torch.nan]))


def test_a_process_runs_on_the_dsq_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "dsq").mkdir()
    (tmp_path / "dsq" / "__init__.py").write_text("raise RuntimeError('the other dsq')")
    with pytest.raises(ValueError, match=r"the process with the dsq of .* failed: (?s:.*)the other dsq"):
        revisions.compare(tmp_path)
