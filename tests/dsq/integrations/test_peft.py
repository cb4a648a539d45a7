"""LoRA on converted models: adapters stay plain unless asked, frozen layers stash nothing, stash policies work."""

import pytest
import torch

import dsq

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

IDS = torch.arange(64).view(2, 32) % 50


def gpt():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def with_lora(model):
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.train()


def loss(model):
    return model(input_ids=IDS, labels=IDS).loss


def test_adapters_stay_plain_unless_asked():
    plain, asked = (dsq.convert(with_lora(gpt()), dsq.DSQConfig(adapters=adapters)) for adapters in (False, True))
    assert not [name for name in dsq.converted(plain) if "lora" in name]
    assert len([name for name in dsq.converted(plain) if name.endswith("q_proj.base_layer")]) == 2
    assert len([name for name in dsq.converted(asked) if "lora" in name]) == 8
    assert set(dsq.converted(asked)) > set(dsq.converted(plain))


def test_lora_on_a_converted_base_is_a_converted_lora():
    config = dsq.DSQConfig("[4,4,4,16]")
    before, after = with_lora(dsq.convert(gpt(), config)), dsq.convert(with_lora(gpt()), config)
    for model in (before, after):
        loss(model).backward()
    assert set(dsq.converted(before)) == set(dsq.converted(after))
    pairs = zip(before.named_parameters(), after.named_parameters(), strict=True)
    trained = [(name, p.grad, q.grad) for (name, p), (_, q) in pairs if p.requires_grad]
    assert len(trained) == 8
    assert all("lora" in name and torch.equal(p, q) for name, p, q in trained)


@pytest.mark.parametrize("policy, share", [("bfp", 0.5), ("gact", 0.5), ("mesa", 0.8), ("checkpoint", 0.5)])
def test_policies_under_lora(policy, share):
    model = with_lora(gpt())
    model.enable_input_require_grads()
    exact = loss(model)
    exact.backward()
    plain = dsq.stash.measure(lambda: loss(model)).nbytes
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    dsq.stash.apply(model, policy)
    loss(model).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert (found - gradient).norm() < 0.3 * gradient.norm()
    assert dsq.stash.measure(lambda: loss(model)).nbytes < share * plain
