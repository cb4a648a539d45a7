"""The shapes of fairseq's transformer against fairseq's own model, small."""

from dataclasses import replace

import pytest

import dsq
from dsq.costmodel.model.methods import DSQ, Setup
from dsq.costmodel.model.traffic import total_stash_bytes
from dsq.costmodel.workloads.transformer import build
from dsq.precision import Precision

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from tests.costmodel.model.running import fairseq
from tests.costmodel.workloads.models import converting_tied
from tests.costmodel.workloads.test_against_models import flops, measured_stash


@pytest.fixture
def small():
    """Model, batch and workload: 11 tokens in, 7 out."""
    model, inputs, shapes = fairseq(24, 2, 3, 100, (3, 11))
    inputs["prev_output_tokens"] = inputs["prev_output_tokens"][:, :7]
    return model, tuple(inputs.values()), converting_tied(build(replace(shapes, target_length=7)))


def test_parameters_and_products(small):
    model, inputs, workload = small
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 2 * workload.macs == flops(model, *inputs)


@pytest.mark.parametrize("precision", ["[16,4,4,16]", "[2,2,2,16]"])
def test_stash(small, precision):
    model, inputs, workload = small
    dsq.convert(model, dsq.DSQConfig(levels=precision, tied=True))
    predicted = total_stash_bytes(workload, Setup(DSQ, Precision.parse(precision)))
    assert predicted == measured_stash(model, *inputs)
