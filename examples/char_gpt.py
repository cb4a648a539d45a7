"""A small GPT on characters that packs the tensors saved for its backward pass.

    python examples/char_gpt.py

The text is a file of Python's own library. dsq.convert packs the inputs of linear layers, and the policy "bfp" the
other saved tensors (attention, norms, GELU, the residual stream). dsq.stash.measure counts the bytes before and after.
The loss is computed in chunks of tokens, so that the logits of all tokens never exist at once.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 3, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        return self.norm(self.blocks(x))  # the head is a part of the loss


def main(steps: int = 200) -> dict[str, float]:
    """Train; returns the first and the last loss, and the bytes of the stash in fp32 and packed."""
    torch.manual_seed(1)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    model = GPT(len(characters))

    def loss() -> Tensor:
        starts = torch.randint(len(ids) - CONTEXT - 1, (BATCH, 1))
        batch = ids[starts + torch.arange(CONTEXT + 1)]
        x, targets, head = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), model.head
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, head.weight, targets, linear_bias=head.bias, options=options)

    fp32_bytes = dsq.stash.measure(loss).nbytes
    dsq.convert(model, dsq.DSQConfig(levels="[4,4,4,8]", exclude="head", stash="linears"))
    controller = dsq.stash.apply(model, "bfp")  # at the q1 of the converted layers: 4 bits
    packed_bytes = dsq.stash.measure(loss).nbytes
    print(f"stash of a step: {fp32_bytes / 2**20:.2f} MiB in fp32, {packed_bytes / 2**20:.2f} MiB packed")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        current = loss()
        current.backward()
        optimizer.step()
        losses.append(current.item())
        if step == 1 or step % 50 == 0:
            print(f"update {step}: loss {losses[-1]:.3f}")
    print(controller.report())
    return {"first": losses[0], "last": losses[-1], "fp32_bytes": fp32_bytes, "packed_bytes": packed_bytes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
