"""Python calls in files of dsq that a warm step makes: its third, forward and backward, counted by sys.setprofile."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import dsq
from dsq.kernels.dispatch import backend_for

pytestmark = pytest.mark.skipif(
    all(gemm.name != "integer" for gemm in backend_for(torch.device("cpu")).gemms), reason="no integer products here"
)
WIDTH = 144  # of no other test: the kernel of a size is chosen once
HOME = Path(dsq.__file__).parent.resolve(), (Path(dsq.__file__).parent / "kernels").resolve()


def calls(model: nn.Module) -> Counter[str]:
    x, counts = torch.randn(8, 64, WIDTH), Counter[str]()

    def note(frame, event, argument):
        if event == "call" and any(map(Path(frame.f_code.co_filename).resolve().is_relative_to, HOME)):
            counts[frame.f_code.co_filename] += 1

    torch.autograd.set_multithreading_enabled(False)  # the backward in this thread, which the profile sees
    try:
        for step in range(3):
            if step == 2:
                sys.setprofile(note)
            model(x).sum().backward()
    finally:
        sys.setprofile(None)
        torch.autograd.set_multithreading_enabled(True)
    return counts


@pytest.fixture(autouse=True)
def _integer_products(monkeypatch):
    monkeypatch.setenv("DSQ_GEMM", "integer")


# files: the codes of inputs are one of its own, as is a form; seven calls of "linears" bound the model's forward
@pytest.mark.parametrize(("stash", "most", "files"), [("linears", 35, 11), ("all", 80, 17)])
def test_one_linear(stash, most, files):
    counts = calls(dsq.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), dsq.DSQConfig("[4,4,4,8]", stash=stash)))
    assert 0 < counts.total() <= most
    assert len(counts) <= files


def test_a_block_with_the_whole_stash():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    # weights are copied for recomputed inputs, and checked in the backward; versions are
    # read by a function, as an inference tensor has none
    assert 0 < calls(dsq.convert(block, dsq.DSQConfig("[4,4,4,8]", stash="all"))).total() <= 272
