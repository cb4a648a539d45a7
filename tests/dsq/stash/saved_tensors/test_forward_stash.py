"""What the quantising policies share: one code for all views and casts of a tensor, shapes and strides as saved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from dsq import stash
from dsq.stash.bfloat16 import Cast
from dsq.stash.saved_tensors.forms import get
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.memory_order import MemoryOrder, span
from dsq.stash.saved_tensors.rules.function_mode import Rules, writes_in_place
from dsq.stash.saved_tensors.storages import storages_of


class Recorder:
    """An encoder that loses nothing, and counts."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> Cast:
        self.shapes.append(tuple(tensor.shape))
        return Cast(values.clone())


@contextmanager
def recording(*weights: nn.Module) -> Iterator[tuple[Recorder, ForwardStash]]:
    recorder = Recorder()
    stash = ForwardStash(recorder, storages_of([list(m.parameters()) for m in weights]), set())
    with saved_tensors_hooks(stash.pack, get):
        yield recorder, stash


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


LAYOUTS = {
    "contiguous": torch.randn(3, 4, 5, 6),
    "transposed": torch.randn(3, 6, 5, 4).transpose(1, 3),
    "channels last": torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
    "sliced": torch.randn(3, 4, 10, 12)[:, :, ::2, 3:9],
    "expanded": torch.randn(3, 1, 5, 6).expand(3, 4, 5, 6),
    "row": torch.randn(1, 1, 1, 6).expand(3, 4, 5, 6),
    "empty": torch.randn(3, 0, 5, 6),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shape_and_values_come_back(name: str) -> None:
    x = LAYOUTS[name]
    order, values = MemoryOrder.of(x)
    back = order.restore(values.reshape(-1))
    assert torch.equal(back, x)
    assert values.numel() == 0 or values.numel() == len({x[i].data_ptr() for i in _indices(x)})
    if name in ("contiguous", "transposed", "channels last"):
        assert back.stride() == x.stride()
        assert values.is_contiguous()


def _indices(x: Tensor) -> Iterator[tuple[int, ...]]:
    return (tuple(i) for i in torch.ones(x.shape).nonzero().tolist())


def test_views_of_the_same_memory_have_the_same_span_and_others_do_not() -> None:
    x = torch.randn(2, 4, 6, 6)
    same = (x, x.view(8, 6, 6), x.transpose(0, 1), x.view(8, 36).t(), x.unsqueeze(0), x[None].expand(3, -1, -1, -1, -1))
    assert len({span(MemoryOrder.of(view)[1]) for view in same}) == 1
    others = (x, x[1:], x[:, :2], x[..., ::2], x[..., :3])
    assert len({span(MemoryOrder.of(view)[1]) for view in others}) == len(others)


def test_a_tensor_saved_by_many_is_encoded_once() -> None:
    q, k, v = (nn.Linear(8, 8) for _ in range(3))
    x = leaf(2, 5, 8) * 1
    with recording(q, k, v) as (recorder, stash):
        scores = q(x) @ k(x).transpose(1, 2)
        out = scores.softmax(-1) @ v(x)
    # x; q and k of the product; the map; v
    assert sorted(recorder.shapes) == sorted([(10, 8), (2, 5, 8), (2, 8, 5), (2, 5, 5), (2, 5, 8)])
    expected = torch.autograd.grad(out.sum(), x)[0]
    again = (q(x) @ k(x).transpose(1, 2)).softmax(-1) @ v(x)
    torch.testing.assert_close(expected, torch.autograd.grad(again.sum(), x)[0])
    assert stash.kept_bytes == 4 * (80 + 80 + 80 + 50 + 80)


def test_autocasts_copies_of_one_tensor_share_a_code_and_keep_their_type() -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    norm = nn.LayerNorm(8)
    x = leaf(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with recording(norm, *layers) as (recorder, _):
            y = norm(x)
            out = sum(layer(y).float().sum() for layer in layers)
        plain = sum(layer(norm(x)).float().sum() for layer in layers)
    assert recorder.shapes == [(4, 8), (4, 8)]  # the norm's input; one copy of its output
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], torch.autograd.grad(plain, x)[0], rtol=1e-6, atol=1e-6)


def test_copies_that_linears_make_of_a_transposed_tensor_share_a_code() -> None:
    """The input of fairseq's first layers."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    x = leaf(4, 5, 8)

    def forward(linears: list[nn.Linear]) -> Tensor:
        y = (x * 1).transpose(0, 1)
        other = y.clone()
        with torch.no_grad():
            other.clamp_(min=0)
        return sum(layer(z) for layer, z in zip(linears, (y, y, other), strict=True)).sin().sum()

    with recording(*layers) as (recorder, stash), Rules({}, stash.pack_by_rule, stash.note_call):
        coded = forward(layers)
    assert recorder.shapes.count((20, 8)) == 2
    weights = [layer.weight for layer in layers]
    plain = torch.autograd.grad(forward(layers), weights)
    assert all(map(torch.equal, torch.autograd.grad(coded, weights), plain))


def test_casts_of_what_differs_are_coded_apart() -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    x = leaf(3, 8)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x * 1
            pairs = layers[0](y[:, None].expand(3, 3, 8)) + layers[1](y[None].expand(3, 3, 8))
            before = layers[2](y)
            with torch.no_grad():
                y.clamp_(min=0)  # known to neither the graph nor the casts made before
            return pairs.float().sin().sum() + (before + layers[3](y)).float().sin().sum()

    with recording(*layers) as (_, stash), Rules({}, stash.pack_by_rule, stash.note_call):
        coded = forward()
    weights = [layer.weight for layer in layers]
    for got, expected in zip(torch.autograd.grad(coded, weights), torch.autograd.grad(forward(), weights), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("func", [Tensor.add_, torch.relu_, Tensor.__setitem__, Tensor.__iadd__, Tensor.data.__set__])
def test_functions_that_write_are_told_by_their_names(func: Callable[..., Any]) -> None:
    assert writes_in_place(func, {})
    assert not any(writes_in_place(other, {"dim": 0}) for other in (torch.add, Tensor.__add__, Tensor.shape.__get__))
    assert writes_in_place(torch.add, {"out": torch.empty(1)})
    assert writes_in_place(F.relu, {"inplace": True})


def test_a_conjugates_part_is_not_taken_for_the_memory_it_views() -> None:
    pairs = leaf(8, 2)

    def forward() -> Tensor:
        z = torch.view_as_complex(pairs * 1)
        return z.imag.square().sum() + 3 * z.conj().imag.square().sum()

    with recording():
        coded = forward()
    torch.testing.assert_close(torch.autograd.grad(coded, pairs), torch.autograd.grad(forward(), pairs))


def test_memory_used_again_is_not_taken_for_the_tensor_before() -> None:
    """Packing frees what was saved; the next tensor of that size often lies in the same place."""
    x = leaf(64, 64)
    with recording() as (recorder, _):
        y = x
        for _ in range(6):
            y = torch.sin(y * 1.5)  # both products are saved by sin alone, and freed
    assert len(recorder.shapes) == 6
    (got,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(6):
        z = torch.sin(z * 1.5)
    assert torch.equal(got, torch.autograd.grad(z.sum(), x)[0])


def test_a_tensor_modified_between_two_consumers_is_encoded_twice() -> None:
    x = leaf(32, 32)
    with recording() as (recorder, _):
        y = x * 1
        first = torch.sin(y)
        y.add_(1)
        second = torch.sin(y)
    assert len(recorder.shapes) == 2
    (got,) = torch.autograd.grad((first + second).sum(), x)
    torch.testing.assert_close(got, x.cos() + (x + 1).cos())


def test_weights_integers_statistics_and_masks_are_not_encoded() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Unflatten(1, (2, 4)), nn.GroupNorm(2, 2), nn.Dropout(0.5)
    )
    x = leaf(6, 8)
    with recording(model) as (recorder, stash):
        out = F.embedding(torch.tensor([0, 2]), model(x).flatten(1))
    assert recorder.shapes == [(6, 8), (6, 8), (6, 2, 4)]  # inputs of linear, layer norm, group norm
    assert stash.raw_bytes > stash.kept_bytes  # dropout's mask, in bits
    out.sum().backward()


def test_the_batch_is_encoded_though_it_needs_no_gradient() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    recorder = Recorder()
    stash = ForwardStash(recorder, storages_of(list(layer.parameters())), storages_of(([x], {})))
    with saved_tensors_hooks(stash.pack, get):
        layer(x)
        layer(torch.randn(4, 8))
    assert recorder.shapes == [(4, 8)]


@pytest.mark.parametrize("name", ["bfp", "gact"])
def test_a_slice_kept_exact_does_not_keep_what_it_is_cut_from(name: str) -> None:
    """A class token, say: few values of a large tensor."""

    class FirstRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.head.weight.sum() * x)[:, 0]).log_softmax(-1)

    model, x = FirstRow(), torch.randn(2, 512, 64)
    stash.apply(model, name)
    held = stash.measure(lambda: model(x.clone()).sum()).held
    assert max(h.nbytes for h in held) < x.nbytes // 4  # the codes of x; 256 KiB in floats


def test_autocasts_copy_of_a_parameter_is_cast_again_and_not_kept() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), torch.randn(4, 64)
    stash.apply(model, "bfp", bits=16)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    assert all(h.nbytes < 256 * 8 * 2 for h in stash.measure(forward).held)
    loss = forward()
    with torch.no_grad():
        model[2].weight.zero_()
    with pytest.raises(RuntimeError, match="needed for the gradient was modified in place after it was saved"):
        loss.backward()
