"""Converted models that PEFT or transformers change: adapters stay plain unless asked, policies survive a resize."""

import pytest
import torch

import dsq
from tests.dsq.gradients import all_gradients, error
from tests.models import transformer

pytest.importorskip("transformers")


def model_of(kind):
    torch.manual_seed(0)
    return transformer(kind, 32, 2, 2, words=64, tie_word_embeddings=False)[0]


def with_lora(model):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.train()


def loss(model):
    ids = torch.arange(64).view(2, 32) % 50
    return model(input_ids=ids, labels=ids).loss


def test_adapters_stay_plain_unless_asked():
    plain, asked = (
        dsq.convert(with_lora(model_of("llama")), dsq.DSQConfig(adapters=adapters)) for adapters in (False, True)
    )
    assert not [name for name in dsq.converted(plain) if "lora" in name]
    assert len([name for name in dsq.converted(plain) if name.endswith("q_proj.base_layer")]) == 2
    assert len([name for name in dsq.converted(asked) if "lora" in name]) == 8
    assert set(dsq.converted(asked)) > set(dsq.converted(plain))


def test_lora_on_a_converted_base_is_a_converted_lora():
    config = dsq.DSQConfig("[4,4,4,16]")
    before, after = with_lora(dsq.convert(model_of("llama"), config)), dsq.convert(with_lora(model_of("llama")), config)
    for model in (before, after):
        loss(model).backward()
    assert set(dsq.converted(before)) == set(dsq.converted(after))
    pairs = zip(before.named_parameters(), after.named_parameters(), strict=True)
    trained = [(name, p.grad, q.grad) for (name, p), (_, q) in pairs if p.requires_grad]
    assert len(trained) == 8
    assert all("lora" in name and torch.equal(p, q) for name, p, q in trained)


@pytest.mark.parametrize("policy, share", [("bfp", 0.5), ("gact", 0.5), ("mesa", 0.8), ("checkpoint", 0.5)])
def test_policies_under_lora(policy, share):
    model = with_lora(model_of("llama"))
    model.enable_input_require_grads()
    exact = loss(model)
    exact.backward()
    plain = dsq.stash.measure(lambda: loss(model)).nbytes
    gradient = all_gradients(model)
    model.zero_grad()
    dsq.stash.apply(model, policy)
    loss(model).backward()
    assert error(all_gradients(model), gradient) < 0.3
    assert dsq.stash.measure(lambda: loss(model)).nbytes < share * plain


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("policy", ["bfp", "gact", "mesa"])
def test_stash_policies_go_on_after_a_resize(kind, policy):
    model, exact = model_of(kind), model_of(kind)
    dsq.stash.apply(model, policy)
    loss(model).backward()
    for it in (model, exact):
        torch.manual_seed(1)
        it.resize_token_embeddings(81)
    for _ in range(3):
        model.zero_grad()
        loss(model).backward()
    loss(exact).backward()
    assert 0 < error(all_gradients(model), all_gradients(exact)) < 0.5
