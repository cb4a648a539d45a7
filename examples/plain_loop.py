"""A plain PyTorch loop whose precision rises by itself.

    python examples/plain_loop.py

An MLP learns the classes that another MLP with random weights gives to random points. It starts with a stash of 3 bits.
The level rises when the validation loss has not fallen by 2 % for three validations.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from dsq.costmodel import predicted


def mlp(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def main(steps: int = 1000, validate_every: int = 25) -> dict[str, list[float]]:
    """Train; returns the validation losses at each level, by its precision."""
    torch.manual_seed(1)
    teacher, model = mlp(64, 5), mlp(128, 5)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 32)
        with torch.no_grad():
            return x, teacher(x).argmax(1)

    config = dsq.DSQConfig(levels="[4,3,3,8] [8,4,4,8]", patience=3, threshold=0.02)
    dynamic = dsq.DynamicPrecision(model, config)  # converts in place: the same parameters, names and state dict
    scheduler = dynamic.scheduler
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x_valid, y_valid = batch(2000)
    cost = predicted(config.as_dict(), dsq.workload.trace(model, x_valid))
    print(f"cost to expect by the paper's model, fixed-point 32 = 1: {cost}")
    losses: dict[str, list[float]] = {}

    for step in range(1, steps + 1):
        x, y = batch(128)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        dynamic.record(updates=1, tokens=len(x))
        if step % validate_every == 0:
            with torch.no_grad():
                loss = F.cross_entropy(model(x_valid), y_valid).item()
            losses.setdefault(str(scheduler.precision), []).append(loss)
            if dynamic.step(loss):  # a plateau
                print(f"update {step}: loss {loss:.3f}, the level rises to {scheduler.precision}")

    for level, seen in zip(scheduler.history()["levels"], losses.values(), strict=False):
        print(f"{level['precision']}: {level['updates']} updates, validation loss {seen[0]:.3f} -> {seen[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    main(parser.parse_args().steps)
