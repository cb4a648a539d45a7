"""WTA-CRS in attention: products of two activations."""

import torch
from torch import Tensor, nn

import dsq.stash
from tests.dsq.stash.every_policy import Checkpointed
from tests.dsq.stash.wtacrs.sampled import check_unbiased, gradients, saved, tokens


class Products(nn.Module):
    """Attention of 4 heads in matmuls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = (q @ k.transpose(-2, -1)).softmax(-1)
        return torch.matmul(self.dropout(p), v).transpose(1, 2).flatten(2)


def test_sampled_products_are_unbiased():
    model, x = Products(), tokens(1, 4, 40)
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.5, products=True)
    estimates = [gradients(model, x) for _ in range(600)]
    assert "3 operands of other products sampled" in str(controller.report())  # q, k and v; p is the softmax's
    check_unbiased([e["input"] for e in estimates], exact["input"], tolerance=0.02)
    check_unbiased([e["qkv.weight"] for e in estimates], exact["qkv.weight"], tolerance=0.03)
    assert not torch.equal(estimates[0]["input"], exact["input"])


def test_a_sampled_product_keeps_rows_of_one_and_columns_of_the_other():
    model, x = Products(dropout=0.1), tokens(1, 4, 40)
    dsq.stash.apply(model, "wtacrs", ratio=0.25, products=True)
    kept = {tuple(t.shape) for t in saved(model, x)}
    # q (40 -> 10 tokens), k^T (40 -> 10), dropout's output (40 -> 10), v (4 -> 1 feature)
    assert {(4, 4, 10, 4), (4, 4, 10, 40), (4, 4, 1, 40)} <= kept
    assert not {(4, 4, 40, 4), (4, 4, 4, 40)} & kept


def test_products_inside_a_checkpoint_stay_exact():
    model, x = Checkpointed(Products(), reentrant=False), tokens()
    exact = gradients(model, x)
    dsq.stash.apply(model, "wtacrs", products=True)
    torch.testing.assert_close(gradients(model, x)["input"], exact["input"])
