"""A small vision transformer on generated images, with GACT's stash.

    python examples/vit_classifier.py

Images of 16 x 16 show stripes, a checkerboard or a disc, shifted and noisy. dsq.convert quantizes the linear layers,
at a level that rises after three quarters of the steps. The policy "gact" gives every other saved tensor 4 bits on
average, and more bits to tensors whose rounding changes the gradient most.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq

SIZE, PATCH, WIDTH, LAYERS, CLASSES, BATCH = 16, 4, 64, 3, 4, 64


def images(count: int) -> tuple[Tensor, Tensor]:
    """(count, 1, SIZE, SIZE) images and their classes."""
    kind = torch.randint(CLASSES, (count,))
    at = torch.arange(SIZE) / SIZE
    row, column = at.view(1, -1, 1) + torch.rand(count, 1, 1), at.view(1, 1, -1) + torch.rand(count, 1, 1)
    across, down = (torch.sin(2 * torch.pi * 3 * t).sign().expand(count, SIZE, SIZE) for t in (row, column))
    disc = ((row % 1 - 0.5) ** 2 + (column % 1 - 0.5) ** 2 < 0.1) * 2.0 - 1
    clean = torch.stack([across, down, across * down, disc], 1)[torch.arange(count), kind]
    return (clean + 2 * torch.randn_like(clean))[:, None], kind


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(tokens).mean(1))


def main(steps: int = 80) -> dict[str, float]:
    """Train; returns the accuracy on fresh images, and the bytes of the stash in fp32 and packed."""
    torch.manual_seed(1)
    model = ViT()
    x, y = images(BATCH)
    fp32_bytes = dsq.stash.measure(lambda: F.cross_entropy(model(x), y)).nbytes

    config = dsq.DSQConfig(levels="[4,4,4,8] [8,4,4,8]", exclude="head", stash="linears")
    dsq.convert(model, config)
    controller = dsq.stash.apply(model, "gact", bits=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        if step == steps * 3 // 4:
            dsq.set_level(model, config, 1)
        x, y = images(BATCH)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 25 == 0:
            print(f"update {step}: loss {loss.item():.3f}")

    packed_bytes = dsq.stash.measure(lambda: F.cross_entropy(model(x), y)).nbytes
    print(*str(controller.report()).splitlines()[:2], sep="\n")  # then a line a tensor
    controller.remove()
    model.eval()
    x, y = images(1000)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"stash of a step: {fp32_bytes / 2**20:.2f} MiB in fp32, {packed_bytes / 2**20:.2f} MiB packed")
    print(f"accuracy on 1,000 new images: {accuracy:.1%}")
    return {"accuracy": accuracy, "fp32_bytes": fp32_bytes, "packed_bytes": packed_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    main(parser.parse_args().steps)
