"""Times of this machine become a hardware file, whose constants the fit finds; a trace keeps no result to its end."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

import dsq
from dsq.costmodel.cli.commands.machine import toml
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.ledger import POINTWISE, TIMED_AS
from dsq.costmodel.model.methods import Setup
from dsq.costmodel.model.roofline import evaluate
from dsq.costmodel.workloads.named import load_workload
from dsq.formats import BFP, Identity
from dsq.precision import Precision
from dsq.workload import calibration, trace


@pytest.fixture
def hasty(monkeypatch):
    """Few and small measurements: their figures mean nothing, their form is that of good ones."""
    small = {"SECONDS": 1e-4, "COPIED": 1 << 14, "ADAM_SIZES": (32, 1024), "WORDS": 64}
    small |= {"LAYERS": ((8, 16, 16), (32, 32, 32), (16, 64, 32), (64, 64, 64)), "BATCHED": ((2, 8, 16, 8),)}
    small |= dict.fromkeys(("SIZES", "LOSS_SIZES"), ((4, 32), (64, 64))) | {"FUSED": ((2, 2, 8, 8), (1, 2, 16, 8))}
    for name, value in small.items():
        monkeypatch.setattr(calibration, name, value)


def test_a_measured_file_serves_every_command(hasty, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(toml(calibration.measure_hardware(torch.device("cpu"))))
    hardware = load_hardware(str(path))
    assert hardware.measured
    assert hardware.rates.startswith("measured (")
    rates = [str(hardware.rate(BFP(m1), BFP(m2))) for m1, m2 in ((2, 2), (4, 3), (4, 16), (12, 9), (32, 4))]
    assert rates == ["2 x 2 bits", "4 x 4 bits", "16 x 4 bits", "16 x 16 bits", "fp32"]
    assert [bool(peak.attention) for peak in hardware.peaks[-3:]] == [False, True, True]
    kinds = {kind for kind, bits, phase in hardware.passes}
    by_bytes = {"parameters", "adapter", "chunked loss", "cap"}  # timed by what they move
    assert kinds - {"pack", "column sum", "turned"} == set(POINTWISE) - by_bytes - set(TIMED_AS)
    workload = load_workload("roberta_base_mnli")
    for setup in (Setup(Identity(), Precision(16, 16, 16, 16)), Setup(BFP(32), Precision(2, 4, 8, 16), container=32)):
        assert 0 < evaluate(workload, setup, hardware).total.seconds < 1e6


@pytest.mark.parametrize("terms", [(1e-11, 2e-10, 3e-5), (1e-11, 0, 3e-5), (1e-11, 0, 0)])
def test_the_fit_finds_the_terms_and_leaves_out_one_that_would_be_negative(terms):
    rng = np.random.default_rng(0)
    sizes = rng.uniform([1e6, 1e3], [1e9, 1e6], (12, 2))
    times = [calibration.TimedProduct(f, v, terms[0] * f + terms[1] * v + terms[2]) for f, v in sizes]
    assert calibration.fitted(times) == pytest.approx(terms, abs=1e-15)
    times = [calibration.TimedProduct(f, v, 1e-11 * f - 1e-12 * v) for f, v in sizes]
    assert all(term >= 0 for term in calibration.fitted(times))


def test_nothing_of_the_forward_stays_until_its_end():
    """fairseq's plugin traces in the training process, whose peak a packed stash is to lower."""
    results, alive = [], []

    def look(module, inputs, y):
        results.append(weakref.ref(y))
        alive.append(sum(reference() is not None for reference in results))

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(6)))
    dsq.convert(model, dsq.DSQConfig(stash="all"))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(look)
    trace(model, torch.randn(32, 8))
    assert len(results) == 18
    assert max(alive) <= 3  # what a block and a layer of it read, and what that makes
