"""PyTorch's own samples of its operations through the mode: an operation without a row is not changed by a bit."""

import sys
import unittest
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.dsq.stash.rules.exactly import under_the_table

if find_spec("expecttest") is None:  # PyTorch's own tests want it for what is not used here
    sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
from torch.testing._internal.common_methods_invocations import op_db

#: results that are memory nobody wrote
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq"}


def outputs_and_gradients(op, sample, table):
    """The differentiable outputs of a sample, and the gradients of its leaves."""
    leaves = []

    def fresh(x):
        if not isinstance(x, torch.Tensor):
            return x
        copy = x.detach().clone().requires_grad_(x.requires_grad)
        if copy.requires_grad:
            leaves.append(copy)
        return copy

    input, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    run = under_the_table if table else (lambda op, *args, **kwargs: (op(*args, **kwargs), None))
    result, stash = run(op, input, *args, **kwargs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    roots = [x for x in outputs if x.requires_grad]
    if not roots:
        return outputs, [], stash
    upstream = [torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).to(x.dtype).view(x.shape) for x in roots]
    return outputs, torch.autograd.grad(roots, leaves, upstream, materialize_grads=True), stash


def differences(op, sample):
    """How the table's results of a sample differ from PyTorch's."""
    try:
        y, plain, _ = outputs_and_gradients(op, sample, table=False)
    except Exception:
        return  # nor does PyTorch run it like this
    try:
        result, actual, stash = outputs_and_gradients(op, sample, table=True)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    no_row_ran_or_kept = stash.bytes.raw == stash.bytes.saved == 0
    slack = {"rtol": 0, "atol": 0} if no_row_ran_or_kept else {"rtol": 1e-6, "atol": 1e-7}
    try:
        torch.testing.assert_close(result, y, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual, plain, **slack, equal_nan=True)
    except AssertionError as error:
        yield str(error)


def samples(op, count):
    dtype = next((d for d in (torch.float64, torch.float32) if d in op.dtypes), None)
    if dtype is None or not op.supports_autograd or op.name in UNWRITTEN:
        return ()
    # op.sample_inputs would look through the stack at each sample for the test that asks
    return islice(op.sample_inputs_func(op, "cpu", dtype, True), count)


@pytest.fixture(autouse=True)
def _samples_are_coded_however_few_values_they_have(monkeypatch):
    monkeypatch.setattr("dsq.stash.stash.MAX_EXACT_NUMEL", 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_an_operation_under_the_table_is_pytorchs(count):
    pairs = ((op, sample) for op in op_db for sample in samples(op, count))
    assert not [(op.full_name, text) for op, sample in pairs for text in differences(op, sample)]
