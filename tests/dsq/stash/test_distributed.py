"""Two processes of DistributedDataParallel over gloo: every policy leaves the ranks with equal weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from analysis.models import encoder
from dsq.stash import apply, policies

RANKS = 2


def batches() -> torch.Tensor:
    """One a rank."""
    return torch.randn(RANKS, 4, 8, 32, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; the gradient."""
    model.zero_grad()
    model(x).pow(3).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def work(rank: int, folder: str) -> None:
    """Train with each policy; write each step's gradient."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    found = {}
    for name in policies():
        torch.manual_seed(0)
        model = encoder(blocks=2, width=32, heads=4, ffn=64)
        apply(model, name)
        parallel = nn.parallel.DistributedDataParallel(model)
        gradients = []
        for _ in range(3):  # gact adapts before the second
            gradients.append(step(parallel, batches()[rank]))
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
        found[name] = torch.stack(gradients)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """The first step's gradient, in one process without a policy: the mean over both batches."""
    torch.manual_seed(0)
    model = encoder(blocks=2, width=32, heads=4, ffn=64)
    return torch.stack([step(model, x) for x in batches()]).mean(0)


#: |g - g0| / |g0| of a step at the defaults: exact, 8 bits, 4 bits; sampled rows
NEAR = {"checkpoint": 1e-5, "selective": 1e-5, "mesa": 0.05, "bfp": 0.3, "gact": 0.3, "wtacrs": 2.0}


@pytest.mark.parametrize("name", NEAR)
def test_ranks_agree_on_the_mean_gradient(name, gradients, exact):
    first, second = (found[name] for found in gradients)
    assert torch.equal(first, second)
    assert (first[0] - exact).norm() < NEAR[name] * exact.norm()
