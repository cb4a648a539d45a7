"""The cross-entropies in chunks of sentences: fairseq's own numbers, without the logits of a batch."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_plugin import loss_in_chunks
from fairseq_plugin.loss_in_chunks import sums
from tests.fairseq_plugin.harness import MODEL, run


def losses(layer):
    def of(features, target):
        total = nn.functional.cross_entropy(layer(features).flatten(0, 1), target.flatten(), reduction="sum")
        return 3 * total, total.detach()

    return of


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_the_sums_and_their_gradients_are_those_of_the_whole(size):
    torch.manual_seed(0)
    layer, x, target = nn.Linear(6, 11).double(), torch.randn(5, 3, 6).double(), torch.randint(11, (5, 3))
    x.requires_grad_()
    parameters = tuple(layer.parameters())
    expected, number = losses(layer)(x, target)
    gradients = torch.autograd.grad(2 * expected, (x, *parameters))
    loss, logged = sums(losses(layer), size, x, target, *parameters)
    assert not logged.requires_grad
    torch.testing.assert_close((loss, logged), (expected.float(), number.float()), check_dtype=False)
    for result, exact in zip(torch.autograd.grad(2 * loss, (x, *parameters)), gradients, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-6, check_dtype=False)


def logged(folder: Path, caplog, *flags: object) -> list[float]:
    """The losses and norms of gradients in the log of two updates and a validation."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run("train", *flags, "--max-update", 2, "--save-dir", folder, "--no-save")
    text = "\n".join(record.getMessage() for record in caplog.records)
    return [float(number) for number in re.findall(r"\b(?:loss|nll_loss|gnorm)[= ]([\d.]+)", text)]


@pytest.mark.parametrize(("criterion", "tied"), [("label_smoothed_cross_entropy", True), ("cross_entropy", False)])
def test_a_run_logs_what_it_logs_without_chunks(data, tmp_path, caplog, monkeypatch, criterion, tied):
    model = [argument for argument in MODEL if tied or argument != "--share-decoder-input-output-embed"]
    flags = [data, *model, "--criterion", criterion, "--dropout", 0, "--dsq-levels", "[8,4,8,8]", "--dsq-stash", "all"]
    chunks = []
    monkeypatch.setattr(loss_in_chunks, "TOKENS", 30)

    def counting(losses, size, x, *rest):
        chunks.append(len(x) / size)
        return sums(losses, size, x, *rest)

    monkeypatch.setattr(loss_in_chunks, "sums", counting)
    actual = logged(tmp_path / "a", caplog, *flags)
    assert max(chunks) > 2
    seen = len(chunks)
    monkeypatch.setattr(loss_in_chunks, "_IN_CHUNKS", {})
    expected = logged(tmp_path / "b", caplog, *flags)
    assert len(chunks) == seen
    assert len(actual) > 6
    assert actual == pytest.approx(expected, rel=2e-3)


def test_what_asks_for_more_than_the_loss_is_as_it_was(data, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_in_chunks, "sums", None)  # would be called
    flags = ["--dsq-levels", "[8,4,8,8]", "--max-update", 1, "--no-save", "--save-dir", tmp_path]
    run("train", data, *MODEL, *flags, "--dsq-stash", "linears")
    run("train", data, *MODEL, *flags, "--dsq-stash", "all", "--report-accuracy")
