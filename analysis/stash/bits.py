"""The table's bits: bytes against the error of the whole gradient, on a GPT that is trained meanwhile.

    python -m analysis.stash.bits --text FILE [--updates 100 300 700 1500]

A GPT on characters (4 blocks, d 192, 6 heads, 256 characters) is trained in float32. After each number of updates its
gradient is computed with every choice of bits on the same batches, products exact, and held against float32's:

    error   norm of the difference of the gradients of all parameters over the norm of float32's
    bits    kept for the backward, of each token and unit of width, the loss's own aside
Writes analysis/results/stash_bits.csv.
"""

import argparse
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis.models import GPT
from dsq.stash import table

WIDTH, BLOCKS, HEADS, LENGTH, BATCH = 192, 4, 6, 256, 8
Setup = tuple[str, str, dict[str, Any], dict[str, int], dict[Any, Any]]
_LINEAR = {function: row for function, row in table.TABLE.items() if row is table.products.plain_linear}
#: bits over the policy's own of "attention and softmax, activation, norm" at 4 bits
_MORE = ((2, 0, 0), (1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1), (2, 2, 2), (3, 2, 2))


def _more(attention: int, activation: int, norm: int) -> Setup:
    more = {"attention": attention, "softmax": attention, "activation": activation, "layernorm": norm}
    name = ", ".join(f"{kind} {4 + n}" for kind, n in more.items() if n and kind != "softmax")
    return name, "bfp", {"bits": 4}, more, table.TABLE


def _all(name: str, policy: str, **options: Any) -> Setup:
    return name, policy, options, {}, table.TABLE


#: (name, policy, options, bits over the policy's own by what is kept, rows)
SETUPS: tuple[Setup, ...] = (
    ("linears alone, 4", "bfp", {"bits": 4}, {}, _LINEAR),
    *(_all(f"all at {bits}", "bfp", bits=bits) for bits in (4, 5, 6, 8)),
    *(_more(*more) for more in _MORE),
    _all("all at 4, stochastic", "bfp", bits=4, rounding="stochastic"),
    _all("mesa", "mesa"),
    _all("gact 4", "gact", bits=4),
    *(_all(f"gact {bits}, snvint", "gact", bits=bits, format="snvint") for bits in (4, 5)),
)


@contextmanager
def applied(
    model: nn.Module, policy: str, options: dict[str, Any], more: dict[str, int], rows: dict[Any, Any]
) -> Iterator[None]:
    """The model under a setup."""
    controller = dsq.stash.apply(model, policy, **options)
    if policy == "bfp":
        controller.more = more  # type: ignore[attr-defined]
    controller.rows = rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        controller.remove()


def batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Characters and those that follow them, (BATCH, LENGTH) each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """The gradient of all parameters in one row, and the bytes kept."""
    model.zero_grad()
    held = dsq.stash.measure(lambda: model(x).float().mean()).nbytes
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), held


def errors(model: nn.Module, text: Tensor, updates: int) -> list[dict]:
    """A row a setup."""
    rows = []
    source = batches(text, seed=1)
    fixed = [next(source) for _ in range(4)]
    exact = [gradient(model, x, y) for x, y in fixed]
    for name, policy, options, more, table_rows in SETUPS:
        with applied(model, policy, options, more, table_rows):
            found = [gradient(model, x, y) for x, y in (fixed[:1] if name.startswith("gact") else []) + fixed]
        found = found[-len(fixed) :]
        error = sum(float((g - e).square().sum()) for (g, _), (e, _) in zip(found, exact, strict=True)) ** 0.5
        error /= sum(float(e.square().sum()) for e, _ in exact) ** 0.5
        rows.append({"updates": updates, "setup": name, "error": error, "bits": bits_of(found[-1][1])})
        print(updates, name, f"{rows[-1]['bits']:.1f} bits, error {error:.4f}", flush=True)
    return rows


def bits_of(nbytes: int) -> float:
    """Bits of a token, a unit of width and a block."""
    return 8 * nbytes / (BATCH * LENGTH * WIDTH * BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text, or .xz of it")
    parser.add_argument("--updates", type=int, nargs="+", default=[100, 300, 700, 1500])
    parser.add_argument("--out", type=Path, default=Path("analysis/results"))
    args = parser.parse_args()
    content = args.text.read_bytes()
    characters = (lzma.decompress(content) if args.text.suffix == ".xz" else content).decode()
    places = {c: i for i, c in enumerate(sorted(set(characters)))}
    text = torch.tensor([places[c] for c in characters])
    torch.manual_seed(0)
    model = GPT(len(places), LENGTH, WIDTH, BLOCKS, HEADS, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rows, source = [], batches(text, seed=0)
    for update in range(1, max(args.updates) + 1):
        x, y = next(source)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, update / 100)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update in args.updates:
            rows += errors(model, text, update)
            pd.DataFrame(rows).to_csv(args.out / "stash_bits.csv", index=False)


if __name__ == "__main__":
    main()
