"""Which policies there are, what they go with, and what is refused in a line."""

import pytest
import torch
from torch import nn

from dsq.stash import apply, policies
from dsq.stash.controller import applied
from tests.dsq.stash.every_policy import NAMES, PAIRS, small, snapshot, train


def test_all_policies_are_registered():
    assert policies() == NAMES


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs(pair):
    for order in (pair, pair[::-1]):
        model = small()
        before = snapshot(model)
        controllers = [apply(model, name) for name in order]
        losses = train(model)
        assert losses[-1] < losses[0]
        for controller in controllers:
            controller.remove()
        assert snapshot(model) == before
        assert applied(model) == {}


def test_which_pairs_there_are():
    partners = {a: {b for pair in PAIRS for b in pair if a in pair and b != a} for a in NAMES}
    assert partners["checkpoint"] == {"bfp", "gact", "mesa", "selective", "wtacrs"}
    assert partners["bfp"] == {"checkpoint", "selective", "wtacrs"}
    assert "gact" not in partners["mesa"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_stash(name):
    for model in (nn.Identity(), nn.Sequential()):
        with pytest.raises(ValueError, match="nothing to stash"):
            apply(model, name)


def test_a_policy_around_a_submodule_counts_as_one_inside_does():
    model = nn.Sequential(small(), small())
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="policy 'bfp' cannot share a model with 'bfp', already applied"):
        apply(model[0], "bfp")
    with pytest.raises(ValueError, match="'gact' cannot share a model with 'bfp'"):
        apply(model[0], "gact")
    apply(model[0], "selective")
    controller.remove()
    apply(model[0], "bfp")
    apply(model[1], "gact")  # beside it, not inside


def test_torch_func_is_refused_in_a_line():
    model = nn.Sequential(nn.Linear(16, 16))
    apply(model, "bfp")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, torch.ones(64, 16)).sum()

    with pytest.raises(RuntimeError, match=r"stash policies do not go with torch\.func"):
        torch.func.grad(loss)(parameters)
    assert loss(parameters).isfinite()
