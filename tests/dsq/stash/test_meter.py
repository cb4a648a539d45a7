"""The meter against a census of live storages, in every place a stash can hide."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsq
from dsq.stash import measure
from tests.dsq.stash.census import saved_bytes


class Holder(torch.autograd.Function):
    """Keeps what ``how`` says on its ctx, not through save_for_backward."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.stash = how(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


@dataclass
class Pair:
    codes: Tensor
    scale: Tensor


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8), nn.Softmax(-1))


def on_a_ctx(how: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    return lambda x: Holder.apply(x.exp(), how)  # exp keeps its result


def by_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: {"half": t.half()}, lambda packed: packed["half"].float()):
        return x.exp()


def checkpointed(reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(MLP, x.neg(), use_reentrant=reentrant, preserve_rng_state=False)


MLP, VALUES = mlp(), 16 * 32
#: a forward of 16 x 32 values, and the bytes that it keeps
FORWARDS = {
    # the input, GELU's input, LayerNorm's input and two statistics, its output, softmax's output
    "plain layers": (lambda x: MLP(x.detach() + 0), 4 * 16 * (32 + 64 + 64 + 2 + 64 + 8)),
    "an attribute": (on_a_ctx(lambda x: x + 1), 8 * VALUES),
    "a list of a dict": (on_a_ctx(lambda x: [{"a": x + 1}, (x + 2,)]), 12 * VALUES),
    "a dataclass": (on_a_ctx(lambda x: Pair((x > 0), x.amax(-1))), 5 * VALUES + 4 * 16),
    "packed": (on_a_ctx(lambda x: dsq.pack(x, dsq.BFP(4))), 4 * VALUES + VALUES // 2 + VALUES // 16),
    "a view of more": (on_a_ctx(lambda x: torch.cat([x, x])[:1]), 12 * VALUES),
    "hooks": (by_hooks, 2 * VALUES),
    "a checkpoint": (checkpointed(False), 4 * VALUES),
    "a reentrant checkpoint": (checkpointed(True), 4 * VALUES),
}


@pytest.mark.parametrize(("forward", "nbytes"), FORWARDS.values(), ids=FORWARDS)
def test_kept_tensors_are_found_wherever_they_are(forward, nbytes):
    leaf = torch.randn(16, 32, requires_grad=True)
    assert measure(lambda: forward(leaf).sum()).nbytes == saved_bytes(lambda: forward(leaf).sum()) == nbytes


def test_shared_storages_count_once_and_parameters_never():
    model = nn.Linear(32, 32)

    def forward():
        x = torch.randn(4, 32)
        return (model(x) + model(x.view(2, 2, 32)).view(4, 32)).sum()

    assert measure(forward).nbytes == 4 * 4 * 32
    frozen = nn.Linear(32, 32).requires_grad_(False)
    x = torch.randn(4, 32, requires_grad=True)
    assert measure(lambda: frozen(x).sum()).nbytes == 0  # keeps its weight only


def test_tensors_without_a_storage_are_not_counted():
    left = []  # of vmap, as those of the masks that transformers makes
    torch.func.vmap(lambda x: left.append(x) or x)(torch.ones(3))
    adjacency = torch.eye(16).to_sparse()
    assert measure(lambda: torch.sparse.mm(adjacency, torch.ones(16, 4, requires_grad=True).exp()).sum()).nbytes == 256


def test_each_storage_is_shown_with_the_operation_that_keeps_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Softmax(-1))
    report = measure(lambda: model(torch.randn(4, 8)).exp())
    nbytes = {(h.op, h.name): h.nbytes for h in report.tensors}
    assert nbytes["GeluBackward0", "self"] == nbytes["SoftmaxBackward0", "result"] == 128
    assert sum(nbytes.values()) == report.nbytes == 4 * 128
    assert "SoftmaxBackward0.result (4, 8) float32" in str(report)
