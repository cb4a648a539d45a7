"""WTA-CRS in attention: projections inside one functional call, and products of two activations."""

import pytest
import torch
from torch import Tensor, nn

import dsq.stash
from tests.dsq.stash.every_policy import Checkpointed
from tests.dsq.stash.wtacrs.sampled import check_unbiased, gradients, saved, tokens

FORMS = [("self", True), ("cross", False), ("widths", True), ("first", False), ("unbatched", False)]


@pytest.mark.parametrize(("form", "need_weights"), FORMS)
def test_multihead_attention(form, need_weights):
    widths = {"kdim": 12, "vdim": 20} if form == "widths" else {}
    model = nn.MultiheadAttention(16, 4, batch_first=form == "first", **widths)
    shape = (lambda n, w: (n, w)) if form == "unbatched" else (lambda n, w: (5, n, w) if form == "first" else (n, 5, w))
    query = torch.randn(shape(14, 16))
    if form in ("self", "first", "unbatched"):
        key = value = query
        padding = torch.zeros(5, 14, dtype=torch.bool) if form != "unbatched" else torch.zeros(14, dtype=torch.bool)
    else:
        key = torch.randn(shape(11, widths.get("kdim", 16)))
        value = torch.randn(shape(11, widths["vdim"])) if widths else key
        padding = torch.zeros(5, 11, dtype=torch.bool)
    padding[..., -2:] = True
    causal = torch.full((14, key.shape[1 if form == "first" else 0]), -torch.inf).triu(1)

    def run() -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        model.zero_grad()
        out, weights = model(query, key, value, key_padding_mask=padding, attn_mask=causal, need_weights=need_weights)
        out.square().sum().backward()
        return out, weights, {n: p.grad.clone() for n, p in model.named_parameters()}

    out, weights, exact = run()
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.5)
    if form != "unbatched":
        controller.set_sample_ids(range(5))
    runs = [run() for _ in range(200)]
    sampled_out, sampled_weights, sampled = runs[-1]
    torch.testing.assert_close(sampled_out, out)
    assert (weights is None) == (sampled_weights is None)
    if weights is not None:
        torch.testing.assert_close(sampled_weights, weights)
    for name in exact:
        if name.endswith("weight"):
            check_unbiased([grads[name] for _, _, grads in runs], exact[name], tolerance=0.1)
        else:
            torch.testing.assert_close(sampled[name], exact[name])
    draws, readers = {"cross": (3, 3), "widths": (4, 4), "unbatched": (2, 4)}.get(form, (2, 2))
    assert f"{draws} draws, read by {readers} linears" in str(controller.report())
    assert (f"{draws} draws used cached" in str(controller.report())) == (form != "unbatched")


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
