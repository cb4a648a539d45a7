"""PyTorch's own samples of its operations through the mode: what has no row is not changed by a bit."""

import sys
import unittest
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from dsq.stash import codes
from tests.dsq.stash.table.exactly import under_the_table

if find_spec("expecttest") is None:  # PyTorch's own tests want it for what is not used here
    sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
from torch.testing._internal.common_methods_invocations import op_db

#: results that are memory nobody wrote
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq"}
GROUPS = 8  #: a test for each: a test an operation would take longer to set up than to run


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
    if table:
        result, stash = under_the_table(op, input, *args, **kwargs)
    else:
        result, stash = op(input, *args, **kwargs), None
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    wanted = [x for x in outputs if x.requires_grad]
    if not wanted:
        return outputs, [], stash
    upstream = [torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).to(x.dtype).view(x.shape) for x in wanted]
    return outputs, torch.autograd.grad(wanted, leaves, upstream, allow_unused=True), stash


def same(a, b):
    """Whether nothing differs by a bit."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    a, b = (x.detach() if x.layout is torch.strided else x.detach().to_dense() for x in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def differences(op, sample):
    """What the table makes of a sample that differs from what PyTorch does."""
    try:
        y, plain, _ = outputs_and_gradients(op, sample, table=False)
    except Exception:
        return  # nor does PyTorch run it like this
    try:
        result, ours, stash = outputs_and_gradients(op, sample, table=True)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    if not all(map(same, result, y)):
        yield "forward"
    alike = same if stash.raw_bytes == stash.kept_bytes == 0 else close  # same: no row ran, or it kept nothing
    if not all(map(alike, ours, plain)):
        yield f"gradient, {alike.__name__}"


def close(a, b):
    if a is None or b is None:
        return a is b or not bool((a if b is None else b).any())
    return torch.allclose(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)


def samples(op, count):
    dtype = next((d for d in (torch.float64, torch.float32) if d in op.dtypes), None)
    if dtype is None or not op.supports_autograd or op.name in UNWRITTEN:
        return ()
    return islice(op.sample_inputs("cpu", dtype, requires_grad=True), count)


def check(ops, count):
    torch.manual_seed(0)
    found = [(op.full_name, text) for op in ops for sample in samples(op, count) for text in differences(op, sample)]
    assert not found


@pytest.fixture(autouse=True)
def _samples_are_coded(monkeypatch):
    """However few values they have."""
    monkeypatch.setattr(codes, "FEW", 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", range(GROUPS))
def test_an_operation_is_what_it_is(group):
    check(op_db[group::GROUPS], 2)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", range(GROUPS))
def test_an_operation_is_what_it_is_on_all_samples(group):
    check(op_db[group::GROUPS], 1000)
