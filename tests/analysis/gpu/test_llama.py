"""The second model of the GPU estimates."""

import torch

from analysis.gpu.llama import Llama


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model = Llama(64, 8, 64, blocks=2, heads=4, dropout=0.0)
    tokens = torch.randint(64, (2, 8))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % 64
    logits, changed_logits = model(tokens), model(changed)
    assert logits.dtype is torch.bfloat16
    assert torch.equal(logits[:, :-1], changed_logits[:, :-1])
    assert not torch.equal(logits[:, -1], changed_logits[:, -1])
    logits.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_attention_depends_on_where_a_token_is():
    torch.manual_seed(0)
    model = Llama(64, 8, 64, blocks=1, heads=4, dropout=0.0)
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first, second = model(tokens)[:, -1].float()
    assert not torch.equal(first, second)
