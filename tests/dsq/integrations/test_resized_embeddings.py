"""transformers' ``resize_token_embeddings`` on converted models and under stash policies."""

import pytest
import torch

import dsq

transformers = pytest.importorskip("transformers")

IDS = torch.arange(32).view(2, 16)


def gpt(tied):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=tied, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(tied):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        tie_word_embeddings=tied, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def loss(model):
    return model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("tied, converts", [(False, False), (True, False), (True, True)])
def test_a_resized_head_is_quantised_as_before(make, tied, converts):
    config = dsq.DSQConfig("[4,4,4,16]", tied=converts)
    model = dsq.convert(make(tied), config)
    before = dsq.converted(model)
    assert isinstance(model.get_output_embeddings(), dsq.Linear) == (converts or not tied)
    model.resize_token_embeddings(81)
    assert list(dsq.converted(model)) == list(before)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    again = make(tied)
    again.resize_token_embeddings(81)
    again.load_state_dict(model.state_dict())
    dsq.convert(again, config)
    for it in (model.eval(), again.eval()):
        loss(it).backward()
    pairs = list(zip(model.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    if not tied or converts:
        assert not dsq.report(model, IDS).left


@pytest.mark.filterwarnings("ignore:gact. codes")  # one batch again and again: all variance is theirs
@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("policy", ["bfp", "gact", "mesa"])
def test_stash_policies_go_on_after_a_resize(make, policy):
    model, exact = make(False), make(False)
    dsq.stash.apply(model, policy)
    loss(model).backward()
    for it in (model, exact):
        torch.manual_seed(1)
        it.resize_token_embeddings(81)
    for _ in range(22):  # to gact's check of its noise
        model.zero_grad()
        loss(model).backward()
    loss(exact).backward()
    found, true = (torch.cat([p.grad.flatten() for p in it.parameters()]) for it in (model, exact))
    assert 0 < (found - true).norm() < 0.5 * true.norm()
