"""Inputs that are overwritten between forward and backward: a rule saves none that PyTorch does not save.

Where plain PyTorch runs, a rule runs and gives the gradient at the inputs of the forward. Where PyTorch ends in an
error, a rule does too, or gives that gradient.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.dsq.gradients import error
from tests.dsq.stash.rules.exactly import under_the_table

B, H, L, D = 8, 2, 16, 8
X, Q, ROW, W, PAD, RULES = (B, L, D), (B, H, L, D), (D,), (4, D), (B, 1, 1, L), (1, H, L, L)


def attend(q, mask, dropout=0.0):
    return F.scaled_dot_product_attention(q, q * 2, q * 3, mask, dropout)


def heads(x, w, out, masked, **masks):
    return F.multi_head_attention_forward(
        *(x, x, x, D, 2, w, None, None, None, False, 0.0, out, None), attn_mask=masked > 0, need_weights=False
    )[0]


CASES = {
    "attention under a sum": (lambda q, table, pad: attend(q, table + pad), Q, RULES, PAD),
    "attention under a choice": (lambda q, pad, a: attend(q, torch.where(pad > 0, a, -9.0)), Q, PAD, (1, 1, L, 1)),
    "attention under a bool": (lambda q, mask: attend(q, mask), Q, "bool"),
    "attention under floats": (lambda q, mask: attend(q, mask), Q, (B, 1, L, L)),
    "attention with dropout": (lambda q, mask: attend(q, mask, 0.3), Q, (B, 1, L, L)),
    "multi-head attention": (heads, (L, B, D), (3 * D, D), (D, D), (L, L)),
    "softmax and product": (lambda q, pad, v: (q @ q.mT + pad).softmax(-1) @ v, Q, PAD, Q),
    "broadcast product": (lambda a, b: a @ b, (H, L, D), (B, H, D, L)),
    "folded product": (lambda a, b: a @ b, (L, D), (B, D, L)),
    "einsum": (lambda q, k: torch.einsum("bhld,hmd->bhlm", q, k), Q, (H, L, D)),
    "linear behind tanh": (lambda x, w: F.linear(x.tanh(), w), X, W),
    "linear behind sigmoid": (lambda x, w: F.linear(1 - x.sigmoid(), w), X, W),
    "linear behind GELU": (lambda x, w: F.linear(F.gelu(x), w), X, W),
    "linear behind PReLU": (lambda x, slope, w: F.linear(F.prelu(x.flatten(0, 1), slope), w), X, ROW, W),
    "linear behind a mask": (lambda x, w: F.linear(F.relu(F.dropout(x.clamp(-1, 1), 0.3)), w), X, W),
    "linear behind products": (lambda x, y, w: F.linear(x * y / y.exp(), w), X, (B, 1, D), W),
    "linear behind rows": (lambda x, w: F.linear(x.relu()[torch.arange(B // 2)], w), X, W),
    "outer sum": (lambda x, y, w: F.linear((x + y).transpose(0, 1).contiguous(), w), (B, 1, D), (1, L, D), W),
    "activation of an outer sum": (lambda x, y, z: F.gelu(x + y) * z, (B, 1, D), (1, L, D), X),
    "norm of an outer sum": (lambda x, y, w: F.layer_norm(x + y, (D,), w), (B, 1, D), (1, L, D), ROW),
    "gated": (lambda z, h, x: z.sigmoid() * h + (1 - z.sigmoid()) * x, X, X, X),
    "residual": (lambda x, y: (x - y).square(), X, X),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z), X, X, (B, L, 1)),
}


def made(shape):
    return torch.randn(B, 1, L, L) > -1 if shape == "bool" else torch.randn(shape)


def refill(x):
    with torch.no_grad():
        if x.dtype == torch.bool:
            x.logical_not_()
        else:
            x.mul_(-2).add_(0.3)


def gradients(run, inputs, needed, refilled, table):
    """The gradients, in one tensor, of a forward after which one input is refilled; None where PyTorch refuses."""
    leaves = [x.clone().requires_grad_() if asked else x.clone() for x, asked in zip(inputs, needed, strict=True)]
    torch.manual_seed(0)
    y = under_the_table(run, *leaves)[0] if table else run(*leaves)
    if refilled is not None:
        refill(leaves[refilled])
    seeds = torch.linspace(0.5, 1.5, y.numel()).view(y.shape)
    leaves = [x for x in leaves if x.requires_grad]
    try:
        leaf_gradients = torch.autograd.grad(y, leaves, seeds, materialize_grads=True)
    except RuntimeError as refusal:
        if "modified by an inplace operation" not in str(refusal):
            raise
        return None
    return torch.cat([dx.flatten() for dx in leaf_gradients])


@pytest.mark.parametrize("max_exact_numel", [0, 1 << 30], ids=["coded", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_a_rule_runs_where_pytorch_does_with_the_gradient_of_the_forward(name, max_exact_numel, monkeypatch):
    monkeypatch.setattr("dsq.stash.stash.MAX_EXACT_NUMEL", max_exact_numel)
    torch.manual_seed(1)
    run, *shapes = CASES[name]
    inputs = [made(shape) for shape in shapes]
    floats = [x.is_floating_point() for x in inputs]
    for frozen in range(-1, len(inputs)):
        needed = [differs and place != frozen for place, differs in enumerate(floats)]
        if not any(needed):
            continue
        expected = gradients(run, inputs, needed, None, table=False)
        for refilled in range(len(inputs)):
            plain = gradients(run, inputs, needed, refilled, table=False)
            actual = gradients(run, inputs, needed, refilled, table=True)
            assert actual is not None or plain is None, (frozen, refilled)
            assert actual is None or error(actual, expected) < 1e-5, (frozen, refilled)
