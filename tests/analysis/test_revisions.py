"""Digests tell what differs in type, shape or values."""

import torch

from analysis import revisions


def test_a_digest_is_of_type_shape_and_values() -> None:
    x = torch.tensor([1.0, 2.0, torch.nan])
    changed = [x.double(), x[None], -x, x.flip(0), x[:2]]
    assert len({revisions.digest(tensor) for tensor in (x, *changed)}) == 6
    assert revisions.digest(x) == revisions.digest(torch.tensor([1.0, 2.0, -torch.nan]))


def test_a_setup_has_a_line_for_each_tensor_and_one_for_its_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr(revisions, "SETUPS", ["[8,4,4,8]", "checkpoint + bfp 4"])
    monkeypatch.setattr(revisions, "MODELS", {"linear layer": revisions.MODELS["linear layer"]})
    monkeypatch.setenv("DSQ_GEMM", "")  # that the call below sets for its process
    revisions.digests()
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    named = [name for setup, name, _ in lines if setup == "[8,4,4,8]"]
    assert named[:3] == ["linear layer 0 0", "linear layer 0 1", "linear layer 0 2"]
    assert named[-1] == "linear layer autocast bytes"
    assert lines[-1] == ["checkpoint + bfp 4", "error", "ValueError"]
