"""Which policies go together, and parts of a model that a loop calls by themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsq.stash import apply, measure
from tests.dsq.gradients import all_gradients
from tests.dsq.stash.every_policy import NAMES, PAIRS, small


def test_pairs_of_policies_are_those_that_share_no_tensors():
    partners = {a: {b for pair in PAIRS for b in pair if a in pair and b != a} for a in NAMES}
    assert partners["checkpoint"] == {"bfp", "gact", "mesa", "selective", "wtacrs"}
    assert partners["bfp"] == {"checkpoint", "selective", "wtacrs"}
    assert "gact" not in partners["mesa"]


def test_a_policy_around_a_submodule_counts_as_one_inside_does():
    model = nn.Sequential(small(), small())
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="'gact' cannot share a model with 'bfp'"):
        apply(model[0], "gact")
    apply(model[0], "selective")
    controller.remove()
    apply(model[0], "bfp")
    apply(model[1], "gact")  # beside it, not inside


X = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0))


def whole(model):
    return model(X)


def parts(model):
    """As a method that is not forward calls them."""
    *blocks, norm = model
    x = X
    for block in blocks:
        x = block(x)
    return F.layer_norm(x, (32,), norm.weight, norm.bias)


def held(model, run):
    """The bytes that a step keeps, and its gradient."""
    nbytes = measure(lambda: run(model).square().mean()).nbytes
    model.zero_grad()
    run(model).square().mean().backward()
    return nbytes, all_gradients(model)


def net(policy):
    model = small()
    return model, apply(model, policy)


@pytest.mark.parametrize("policy", ["bfp", "selective"])
def test_a_method_that_is_not_forward_keeps_no_more(policy):
    (kept, expected), (of_parts, found) = held(net(policy)[0], whole), held(net(policy)[0], parts)
    assert of_parts < kept + 2 * 2 * X.nbytes  # the sums that blocks begin with are another block's output
    assert of_parts < held(small(), parts)[0] * (0.4 if policy == "bfp" else 1.1)
    assert F.cosine_similarity(found, expected, 0) > 0.99


@pytest.mark.parametrize("policy", ["mesa", "gact"])
def test_policies_of_whole_forwards_leave_parts_exact(policy):
    model, _ = net(policy)
    for _ in range(2):
        held(model, whole)
    assert held(model, parts)[0] == held(small(), parts)[0]


def test_parts_that_follow_one_another_are_one_forward():
    model, controller = net("bfp")
    model(X)
    of_all = controller.report().raw_bytes
    for _ in range(2):
        parts(model)
        assert 0.8 * of_all < controller.report().raw_bytes <= of_all + 2 * 2 * X.nbytes
