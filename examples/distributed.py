"""The same training on one process or on many, with DDP, FSDP2 or none: losses and levels agree.

    python examples/distributed.py
    torchrun --nproc-per-node 2 examples/distributed.py --engine ddp
    torchrun --nproc-per-node 2 examples/distributed.py --engine fsdp2

Each rank takes its share of the batch. Blocks of 16 values lie across tokens, so the numbers equal those of one
process if the tokens of each rank are a multiple of 16 (docs/distributed.md).
"""

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dsq

WIDTH, LENGTH, BATCH, WORDS = 32, 16, 8, 20


class Net(nn.Module):
    """Says the word before each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.blocks(torch.cat([x, x.roll(1, 1)], -1)))


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """A rank's share of the batch of a step: words and what the model is to say, (BATCH / ranks, LENGTH) each."""
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    ids = ids.chunk(ranks)[rank]
    return ids, ids.roll(1, 1)


def loss_of(model: nn.Module, ids: Tensor, before: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), before.flatten())


def main(engine: str = "none", steps: int = 60, validate_every: int = 10) -> dict[str, list[float]]:
    """Train; returns the validation losses, of all ranks together, and the levels after each."""
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if engine != "none" else (0, 1)
    torch.manual_seed(1)
    model: nn.Module = Net()
    config = dsq.DSQConfig(levels="[4,4,4,8] [8,4,4,8]", patience=1, threshold=0.5)
    dynamic = dsq.DynamicPrecision(model, config)
    if engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "fsdp2":
        model = fully_shard(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shown: dict[str, list[float]] = {"losses": [], "levels": []}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank, ranks)).backward()
        optimizer.step()
        dynamic.record(updates=1, tokens=BATCH * LENGTH)
        if step % validate_every == 0:
            with torch.no_grad():
                loss = loss_of(model, *batch(0, rank, ranks))
            dynamic.step(loss)  # the ranks' mean decides, for all of them
            if ranks > 1:
                distributed.all_reduce(loss)
            shown["losses"].append(loss.item() / ranks)
            shown["levels"].append(dynamic.scheduler.level)
            if rank == 0:
                print(f"update {step}: validation loss {shown['losses'][-1]:.6f}, level {dynamic.scheduler.precision}")
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("none", "ddp", "fsdp2"), default="none")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.engine != "none":
        if "RANK" not in os.environ:
            parser.error(f"--engine {options.engine} runs under torchrun")
        distributed.init_process_group("gloo")
    main(options.engine, options.steps)
    if options.engine != "none":
        distributed.destroy_process_group()
