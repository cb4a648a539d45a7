"""The table's bits: bytes against the error of the whole gradient, on a GPT that is trained meanwhile.

    python -m analysis.stash.bits --text FILE [--updates 100 300 700 1500]

A GPT on characters (4 blocks, d 192, 6 heads, 256 characters) is trained in float32. After each number of updates its
gradient is computed with every choice of bits on the same batches, products exact, and held against float32's:

    error   norm of the difference of the gradients of all parameters over the norm of float32's
    bits    kept for the backward, of each token and unit of width, the loss's own aside
Writes analysis/results/stash_bits.csv and .png.
"""

import argparse
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis.models import GPT
from dsq.stash import table

WIDTH, BLOCKS, HEADS, LENGTH, BATCH = 192, 4, 6, 256, 8
_LINEAR = {function: row for function, row in table.TABLE.items() if row is table.products.plain_linear}
_NONE: dict[str, int] = {}
#: name -> (policy, options, bits over the policy's own by what is kept, rows)
SETUPS: dict[str, tuple[str, dict, dict[str, int], dict]] = {
    "linears alone, 4": ("bfp", {"bits": 4}, _NONE, _LINEAR),
    "all at 4": ("bfp", {"bits": 4}, _NONE, table.TABLE),
    "attention 6": ("bfp", {"bits": 4}, {"attention": 2, "softmax": 2}, table.TABLE),
    "attention 5, activation 5": ("bfp", {"bits": 4}, {"attention": 1, "activation": 1}, table.TABLE),
    "attention 6, activation 5": ("bfp", {"bits": 4}, {"attention": 2, "activation": 1}, table.TABLE),
    "attention 6, activation 6": ("bfp", {"bits": 4}, {"attention": 2, "activation": 2}, table.TABLE),
    "attention 6, activation 6, norm 5": (
        "bfp",
        {"bits": 4},
        {"attention": 2, "activation": 2, "norm": 1},
        table.TABLE,
    ),
    "attention 6, activation 6, norm 6": (
        "bfp",
        {"bits": 4},
        {"attention": 2, "activation": 2, "norm": 2},
        table.TABLE,
    ),
    "attention 7, activation 6, norm 6": (
        "bfp",
        {"bits": 4},
        {"attention": 3, "activation": 2, "norm": 2},
        table.TABLE,
    ),
    "all at 5": ("bfp", {"bits": 5}, _NONE, table.TABLE),
    "all at 6": ("bfp", {"bits": 6}, _NONE, table.TABLE),
    "all at 8": ("bfp", {"bits": 8}, _NONE, table.TABLE),
    "all at 4, stochastic": ("bfp", {"bits": 4, "rounding": "stochastic"}, _NONE, table.TABLE),
    "mesa": ("mesa", {}, _NONE, table.TABLE),
    "gact 4": ("gact", {"bits": 4}, _NONE, table.TABLE),
    "gact 4, snvint": ("gact", {"bits": 4, "format": "snvint"}, _NONE, table.TABLE),
    "gact 5, snvint": ("gact", {"bits": 5, "format": "snvint"}, _NONE, table.TABLE),
}


@contextmanager
def applied(model: nn.Module, name: str) -> Iterator[None]:
    """The model under a setup."""
    policy, options, more, rows = SETUPS[name]
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
    for name in SETUPS:
        with applied(model, name):
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


def picture(rows: pd.DataFrame, path: Path) -> None:
    """Bits against error after the most updates, a point a setup; the line is the error of the linears' stash alone."""
    late = rows[rows.updates == rows.updates.max()]
    alone = late[late.setup == "linears alone, 4"].error.iloc[0]
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.axhline(alone, color="grey", linestyle="--", label="the linears' inputs alone at 4 bits")
    for row in late[late.setup != "linears alone, 4"].itertuples():
        axes.plot(row.bits, row.error, "o", color="tab:blue" if "gact" not in row.setup else "tab:orange")
        axes.annotate(row.setup, (row.bits, row.error), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="bits of a token, a unit of width and a block", ylabel="error of the whole gradient", yscale="log")
    axes.set_title(f"a GPT after {late.updates.iloc[0]} updates")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


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
    picture(pd.DataFrame(rows), args.out / "stash_bits.png")


if __name__ == "__main__":
    main()
