"""Operations with a rule: a function, and the shapes of its inputs."""

from functools import partial

import torch
from torch.nn import functional as F


def drawn(*shape, seed=0, scale=1.0, offset=0.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset


attend = F.scaled_dot_product_attention
X = (3, 16, 32)
MASK = torch.zeros(16, 16, dtype=torch.float64).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
SEEN = (torch.arange(16) < torch.tensor([[16], [9], [5]]))[:, None, None]
MASKS = torch.zeros(SEEN.shape, dtype=torch.float64).masked_fill(~SEEN, -torch.inf)
PLACES = torch.tensor([2, 0, 2])
FUNCTIONS = (F.gelu, F.silu, F.mish, F.elu, F.selu, F.softplus, F.glu, F.relu, F.leaky_relu, F.hardtanh)
FUNCTIONS += (torch.tanh, torch.sigmoid, torch.square)
IN_PLACE = (F.silu, F.mish, F.elu, F.leaky_relu, F.relu6, F.dropout, F.relu)


def in_place(function, x):
    return function(x + 0, inplace=True)


CASES = {
    "linear": (F.linear, [X, (24, 32), (24,)]),
    "linear without bias": (F.linear, [X, (24, 32)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), [(24,), (48, 32), (32, 24)]),
    "matmul": (lambda a, b: a @ b, [(3, 4, 16, 32), (3, 4, 32, 16)]),
    "matmul, broadcast": (torch.matmul, [(3, 4, 16, 32), (32, 16)]),
    "bmm": (torch.bmm, [(4, 16, 32), (4, 32, 16)]),
    "mm": (torch.mm, [(16, 32), (32, 24)]),
    **{
        f"einsum {equation}": (partial(torch.einsum, equation), [*shapes])
        for equation, *shapes in (
            ("bthd, bshd -> bhts", (2, 16, 4, 8), (2, 12, 4, 8)),
            ("bhts,bshd->bthd", (2, 4, 16, 12), (2, 12, 4, 8)),
            ("...td,...sd->...ts", (2, 4, 16, 8), (2, 4, 12, 8)),
            ("...k,kn->...n", (2, 4, 16, 8), (8, 24)),
            ("bijk,bjkl->bil", (3, 4, 8, 6), (3, 8, 6, 5)),
            ("btd,btd->bt", (2, 16, 32), (2, 16, 32)),
            ("btd,dhe->bthe", (2, 16, 8), (8, 4, 6)),
            ("bthe,hed->btd", (2, 16, 4, 6), (4, 6, 8)),
            ("bdte,bdes->sbt", (3, 4, 8, 6), (3, 4, 6, 5)),
            ("td,...sd->...st", (16, 8), (2, 4, 12, 8)),
        )
    },
    "softmax": (lambda x: F.softmax(x * 4, -1), [(3, 4, 16, 16)]),
    "softmax of another axis": (lambda x: torch.softmax(x, 1), [X]),
    "attention": (lambda q, k, v: attend(q, k, v), [(2, 4, 16, 32)] * 3),
    "attention, causal": (lambda q, k, v: attend(q, k, v, is_causal=True), [(2, 4, 16, 32)] * 3),
    "attention, masked": (lambda q, k, v: attend(q, k, v, MASK.to(q.dtype)), [(2, 4, 16, 32)] * 3),
    "attention, biased": (  # by numbers that bfloat16 rounds
        lambda q, k, v: attend(q, k, v, drawn(16, 16, offset=-30).to(q.dtype)), [(2, 4, 16, 32)] * 3
    ),
    "attention, learned mask": (attend, [(2, 4, 16, 32)] * 3 + [(4, 16, 16)]),
    "attention, learned bias under masks": (
        lambda q, k, v, bias: attend(q, k, v, torch.where(SEEN, bias, -torch.inf)),
        [(3, 4, 16, 32)] * 3 + [(1, 4, 16, 16)],
    ),
    "attention, sum of masks": (
        lambda q, k, v, bias: attend(q, k, v, bias + MASKS.to(q.dtype)),
        [(3, 4, 16, 32)] * 3 + [(1, 4, 16, 16)],
    ),
    "attention, dropout": (lambda q, k, v: attend(q, k, v, None, 0.3), [(2, 4, 16, 32)] * 3),
    "attention, dropout, long": (lambda q, k, v: attend(q, k, v, None, 0.3), [(1, 2, 64, 8)] * 3),  # drawn again
    "attention, dropout, biased": (  # autocast moves these numbers by 1, in the forward as in the backward
        lambda q, k, v: attend(q, k, v, drawn(16, 16, offset=-300, scale=2).to(q.dtype), 0.3), [(2, 4, 16, 32)] * 3
    ),
    "attention, grouped": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        [(2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32)],
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), [X, (32,), (32,)]),
    "linear, layer norm": (lambda x, v, w, b: F.layer_norm(F.linear(x, v), (24,), w, b), [X, (24, 32), (24,), (24,)]),
    "layer norm of nearly nothing": (lambda x, w, b: F.layer_norm(x * 1e-3, (32,), w, b), [X, (32,), (32,)]),
    "layer norm over two axes": (lambda x, w, b: F.layer_norm(x, (16, 32), w, b), [X, (16, 32), (16, 32)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (32,), w), [X, (32,)]),
    "rms norm, plain": (lambda x: F.rms_norm(x, (32,), eps=1e-6), [X]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 8, 5, 6), (8,), (8,)]),
    "batch norm of rows": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(64, 8), (8,), (8,)]),
    "batch norm, evaluation": (
        lambda x, w, b: F.batch_norm(x, torch.ones(8).to(x), torch.full((8,), 2.0).to(x), w, b, False),
        [(4, 8, 5, 6), (8,), (8,)],
    ),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(4, 8, 5, 6), (8,), (8,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(4, 8, 5, 6), (8,), (8,)]),
    "normalize": (lambda x: F.normalize(x, dim=-1), [X]),
    "normalize, of nearly nothing": (lambda x: F.normalize(x * 1e-9), [X]),
    "normalize, shorter than eps": (lambda x: F.normalize(x, dim=-1, eps=5.6), [X]),
    "vector norm": (lambda x: torch.linalg.vector_norm(F.silu(x), dim=(1, 2), keepdim=True), [X]),
    "norm": (lambda x: F.silu(x).norm(p=2, dim=1), [X]),
    "norm of all": (lambda x: torch.norm(F.silu(x)), [X]),
    **{function.__name__: (function, [X]) for function in FUNCTIONS},
    "prelu": (F.prelu, [X, (16,)]),
    "hardswish": (lambda x: F.hardswish(x * 4), [X]),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [X]),
    "gelu, expanded": (lambda x: F.gelu((x + 1).expand(3, 16, 32)), [(1, 16, 32)]),
    "silu, of a column for all": (lambda x: F.silu((x + 1).expand(3, 16, 32)), [(3, 16, 1)]),
    "mul": (torch.mul, [X, X]),
    "mul, broadcast": (lambda a, b: a * b, [X, (3, 16, 1)]),
    "addcmul": (lambda x, a, b: torch.addcmul(x, a, b, value=0.5), [X, X, X]),
    "addcmul, broadcast": (torch.addcmul, [(32,), (32,), X]),
    "mul, expanded": (lambda a, b: (a + 1).expand(3, 16, 32) * b, [(1, 16, 32), X]),
    "expanded, then as it is": (lambda x: (lambda h: F.gelu(h.expand(3, 16, 32)) + F.tanh(h))(x + 1), [(1, 16, 32)]),
    "the rest that a gate leaves": (lambda x, y: (1 - torch.sigmoid(x)) * y, [X, X]),
    "quotient": (lambda a, b: torch.tanh(a / (b.abs() + 1)), [X, X]),
    "quotient, broadcast": (lambda a, b: torch.tanh(a / (b.abs() + 1)), [X, (3, 16, 1)]),
    "residual": (lambda x, s: ((drawn(16, 32).to(x) - x) * torch.exp(s)) ** 2, [X, X]),
    "pow": (lambda x: x**2, [X]),
    "cube": (lambda x: torch.pow(x, 3.0), [X]),
    "relu, transposed": (lambda x: F.relu(x.transpose(0, 1)), [X]),
    "relu6": (lambda x: F.relu6(x * 6), [X]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [X]),
    "clamp, of its limits": (lambda x: torch.clamp(F.relu(x), min=0.0), [X]),
    **{f"{function.__name__} in place": (partial(in_place, function), [X]) for function in IN_PLACE},
    "silu in place of few": (lambda x: F.silu(x + 0, inplace=True), [(4, 8)]),
    "elu in place, of an alpha": (lambda x: F.elu(x + 0, 0.5, True), [X]),
    "elu in place, transposed": (lambda x: F.elu((x + 0).transpose(0, 1), inplace=True), [X]),
    "relu6 in place, of its limits": (lambda x: F.relu6(x * 6, inplace=True), [X]),
    "a part in place": (lambda x: F.mish((x + 0)[1:], inplace=True), [X]),
    "dropout": (lambda x: F.dropout(x, 0.3), [X]),
    "dropout, transposed, changed": (lambda x: F.dropout((x + 0).mT, 0.3).mul_(2), [(6, 12, 32)]),
    "dropout, of channels last": (lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.3), [(4, 8, 6, 6)]),
    "dropout, with gaps": (lambda x: F.dropout(x[:, ::2], 0.3), [(64, 32)]),
    "max pool": (lambda x: F.max_pool2d(x, 2), [(4, 8, 6, 6)]),
    "max pool, strided": (lambda x: F.max_pool2d(x, 3, 2, 1), [(4, 8, 6, 6)]),
    "max pool of rows": (lambda x: F.max_pool1d(x, 3, 2, 1), [(4, 8, 32)]),
    "max pool of volumes": (lambda x: F.max_pool3d(x, 2, ceil_mode=True), [(2, 4, 5, 6, 7)]),
    "average pool": (lambda x: F.avg_pool2d(x, 2), [(4, 8, 6, 6)]),
    "average pool of rows": (lambda x: F.avg_pool1d(x, 5, 1, 2, count_include_pad=False) ** 2, [(4, 8, 32)]),
    "average pool of volumes": (lambda x: F.avg_pool3d(x, 2), [(2, 4, 6, 6, 6)]),
    "reflection": (lambda x: F.pad(x, (2, 1), mode="reflect"), [(4, 8, 32)]),
    "replication": (lambda x: F.pad(x, (2, 1, 0, 3), "replicate"), [(4, 8, 6, 6)]),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 3), [(4, 8, 6, 6)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), [(4, 8, 32), (6, 8, 3), (6,)]),
    "conv1d, same size": (lambda x, w: F.conv1d(x, w, padding="same", dilation=2), [(4, 8, 32), (6, 8, 4)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(4, 8, 6, 6), (6, 8, 3, 3), (6,)]),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=4), [(4, 8, 6, 6), (8, 2, 3, 3)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), [(4, 8, 6, 6), (8, 6, 3, 3), (6,)]
    ),
    "index_select": (lambda x: torch.index_select(x * x, 0, PLACES) ** 2, [X]),
    "x[index]": (lambda x: (x * x)[PLACES] ** 2, [X]),
    "gather": (lambda x: torch.gather(x * x, 1, PLACES.expand(3, 16, 3)) ** 2, [X]),
    "index_add": (lambda x, s: torch.index_add(x, 1, PLACES, s, alpha=2), [X, (3, 3, 32)]),
    "index_add in place, twice": (
        lambda a, b: torch.zeros(4, 32).to(a).index_add_(0, PLACES, a).index_add_(0, PLACES[:1], b),
        [(3, 32), (1, 32)],
    ),
    "norm, linear": (lambda x, w, b, m: F.linear(F.layer_norm(x, (32,), w, b), m), [X, (32,), (32,), (24, 32)]),
    "gated unit": (lambda a, b, m: F.linear(F.silu(a) * b, m), [X, X, (24, 32)]),
    "dropped activation": (lambda x, m: F.linear(F.dropout(F.gelu(x), 0.3), m), [X, (24, 32)]),
    "batch norm, relu, conv": (
        lambda x, w, b, m: F.conv2d(F.relu(F.batch_norm(x, None, None, w, b, True), inplace=True), m),
        [(4, 8, 6, 6), (8,), (8,), (6, 8, 3, 3)],
    ),
    "eager attention": (
        lambda q, k, v: F.dropout(F.softmax(q @ k.mT / 5 + MASK.to(q.dtype), -1), 0.3) @ v, [(2, 4, 16, 32)] * 3
    ),
}  # fmt: skip
