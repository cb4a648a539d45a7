"""Packed checkpoint boundaries: the forward of plain checkpoints, and the gradient at rounded inputs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.library_models import transformer
from dsq.formats import SignedNVInt
from dsq.stash import packed_checkpoint
from tests.dsq.gradients import error, step

BLOCKS, TOKENS, WIDTH = 4, 64, 32


@pytest.fixture
def blocks():
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(BLOCKS)
    )


def forward(blocks, x):
    torch.manual_seed(1)
    x = x * 1  # a boundary is no leaf
    for block in blocks:
        x = packed_checkpoint(block, x)
    return x.square().sum()


def test_the_backward_sees_each_segment_at_its_rounded_input(blocks):
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    forward(blocks, x).backward()
    gradients = [x.grad, *(p.grad for p in blocks.parameters())]

    blocks.zero_grad()
    torch.manual_seed(1)
    inputs, states = [x.detach()], []
    for block in blocks:
        states.append(torch.get_rng_state())
        inputs.append(block(inputs[-1]).detach())
    dy = 2 * inputs[-1]
    for block, value, state in reversed(list(zip(blocks, inputs, states, strict=False))):
        rounded = dsq.quantize(value, SignedNVInt(4)).requires_grad_()
        torch.set_rng_state(state)
        block(rounded).backward(dy)
        dy = rounded.grad
    expected = [dy, *(p.grad for p in blocks.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(forward(blocks, x), x, create_graph=True)


def test_an_input_of_many_segments_is_packed_once_and_masks_stay_exact():
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    bias = torch.zeros(1, 2, TOKENS, TOKENS, requires_grad=True)
    memory = torch.randn(2, TOKENS, WIDTH, requires_grad=True)

    def segment(x, memory, bias):
        return x + torch.softmax(x @ memory.mT / 6 + bias.mean(1), -1) @ memory

    def loss(**options):
        x, seen, masked = memory * 0.5, memory * 2, bias + mask
        for _ in range(3):
            x = packed_checkpoint(segment, x, seen, masked, **options)
        return x.sum()

    shown = dsq.stash.measure(loss)
    codes = [held for held in shown.tensors if held.dtype == "uint8" and held.nbytes == memory.numel() // 2]
    assert len(codes) == 4  # x of three segments, what they all attend to once
    loss(fmt=dsq.BFP(8)).backward()
    rounded, bias.grad = bias.grad, None
    loss(fmt=dsq.BFP(32)).backward()
    assert error(rounded, bias.grad) < 0.05


def test_transformers_takes_it_for_its_checkpoints():
    pytest.importorskip("transformers")
    model, batch = transformer("llama", 32, 3, 2, words=50, batch=(2, TOKENS))

    def loss():
        return model(**batch).loss

    model._set_gradient_checkpointing(gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    exact, before = loss(), dsq.stash.measure(loss).nbytes
    exact.backward()
    expected = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()

    model._set_gradient_checkpointing(gradient_checkpointing_func=partial(packed_checkpoint, use_reentrant=False))
    actual = loss()
    assert torch.equal(actual, exact)
    actual.backward()
    assert 0 < error(model.model.embed_tokens.weight.grad, expected) < 0.2
    spared = 2 * TOKENS * 32 * (64 - 9) // 16 - 1  # of a boundary; the tensor has a scale too
    assert before - dsq.stash.measure(loss).nbytes == 3 * spared


class Routed(nn.Module):
    """Each token goes to one of four experts, in a segment of PyTorch's checkpointing or not."""

    def __init__(self, choose):
        super().__init__()
        self.choose, self.router, self.segment = choose, nn.Linear(WIDTH, 4), False
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x):
        return checkpoint(self.routed, x, use_reentrant=False) if self.segment else self.routed(x)

    def routed(self, x):
        scores = self.router(x).softmax(-1)
        choices = self.choose(scores)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(choices == number)[0]
            y = y.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return x + y


@pytest.mark.parametrize(
    "choose", [lambda s: s.argmax(-1), lambda s: torch.topk(s, 1)[1][:, 0]], ids=["argmax", "topk"]
)
def test_a_router_chooses_the_same_experts_when_it_is_recomputed(choose):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(choose), Routed(choose))
    dsq.convert(model, dsq.DSQConfig("[8,4,4,8]", stash="all"))
    x = torch.randn(512, WIDTH)
    _, _, *expected = step(model, x)
    model[1].segment = model[2].segment = True
    _, _, *gradients = step(model, x)
    assert all(error(*pair) <= 0.02 for pair in zip(gradients, expected, strict=True))


def test_segments_under_hooks_that_unpack_once_leave_their_inputs_there(blocks):
    """TRL's activation_offloading forgets a tensor as it unpacks it, and cannot unpack one in a forward."""
    held = {}

    def pack(x):
        held[len(held)] = x.clone()
        return len(held) - 1

    def unpack(number):
        assert torch._C._current_graph_task_id() != -1, "in a forward"
        return held.pop(number)

    class Segments(nn.ModuleList):
        def forward(self, x, scale):  # adapters alone are trained: the first input is a leaf
            for block in self:
                x = checkpoint(lambda x, scale, block=block: block(x) * scale, x, scale, use_reentrant=False)
            return x

    model = dsq.convert(Segments(blocks), dsq.DSQConfig("[8,8,8,8]", stash="all"))
    x, scale = torch.randn(2, TOKENS, WIDTH, requires_grad=True), torch.rand(2, TOKENS, 1)
    _, _, _, *expected = step(model, x, scale)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            _, _, _, *gradients = step(model, x, scale)
        assert not held
        assert all(error(*pair) < 0.05 for pair in zip(gradients, expected, strict=True))
