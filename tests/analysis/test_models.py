"""The name of a setup decides what is put on a model."""

import pytest
import torch

import dsq
from analysis.models import GPT, attach

WORDS = (
    *("fp32", "bf16 autocast + fused", "[8,4,4,8] all headless + around snvint 4", "[2,2,2,16] stochastic float32"),
    *("[4,4,4,16] bfp + autocast", "[8,4,4,8] tied + mesa", "gact", "gact 4 uniform", r"checkpoint encoder\.\d+"),
    *("plain", "checkpoint + gact 4 uniform", "selective + bfp 4", "wtacrs 0.3 + bfp 4", "around checkpoint"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORDS)
def test_a_name_says_what_is_converted_and_which_policies_apply(name: str) -> None:
    model = GPT(16, 8, 16, 2, 2, dropout=0.0)
    controllers = attach(model, name)
    model(torch.randint(16, (2, 8))).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    policies = {*dsq.stash.policies(), "snvint"}
    assert len(controllers) == sum(part.split()[0] in policies for part in name.split(" + "))
    assert bool(dsq.converted(model)) == ("[" in name)


@pytest.mark.parametrize("name", ["compiled + autocast", "bfp 4 + compiled", "bfp 4 + compiled recomputing"])
def test_the_blocks_are_compiled_and_nothing_else(name: str) -> None:
    model = GPT(16, 8, 16, 2, 2, dropout=0.0)
    attach(model, name)
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == list(model.encoder)[:-1]


def test_options_reach_the_config() -> None:
    model = GPT(16, 8, 16, 2, 2, dropout=0.0, tied=False)
    attach(model, "[8,4,4,8] bfp headless + bf16")
    assert "head" not in dsq.converted(model)
    assert next(model.parameters()).dtype == torch.bfloat16
