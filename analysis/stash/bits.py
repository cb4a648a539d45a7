"""The table's bits: bytes against the error of the whole gradient, on a GPT that is trained meanwhile.

    python -m analysis.stash.bits --data DIR    # writes analysis/results/stash_bits.csv

The suite's GPT on the characters of WikiText-2 (4 blocks, d 192, 6 heads, 256 characters) is trained in float32. After
each number of updates its gradient is computed with every choice of bits on the same batches, products exact, and held
against float32's:

    error   norm of the difference of the gradients of all parameters over the norm of float32's
    bits    kept for the backward, of each token and unit of width, the loss's own aside
"""

import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis import ROOT
from analysis.evidence.problems import make
from analysis.evidence.suite import load_suite, locate
from dsq.command import OneLineParser, as_csv, guarded, write_text
from dsq.stash import table

OUT = ROOT / "analysis" / "results" / "stash_bits.csv"
UPDATES = (100, 300, 700, 1500)
TASK = load_suite().tasks["wikitext2"]
#: values of one activation of every block, in a batch
VALUES = TASK.batch * TASK.sizes["context"] * TASK.sizes["width"] * TASK.sizes["blocks"]
_LINEAR = {function: row for function, row in table.TABLE.items() if row is table.products.plain_linear}


@dataclass(frozen=True)
class StashSetup:
    """A stash policy, and what differs from it."""

    policy: str
    options: dict[str, Any]
    more: dict[str, int] = field(default_factory=dict)  #: bits of bfp over its own by what is kept
    rows: dict[Any, Any] = field(default_factory=lambda: table.TABLE)  #: rows of the table of operations

    def applied(self, model: nn.Module) -> Any:
        """The model's controller under the setup."""
        controller: Any = dsq.stash.apply(model, self.policy, **self.options)
        if self.policy == "bfp":
            controller.more = self.more
        controller.rows = self.rows
        return controller


def _more(attention: int, activation: int, norm: int) -> tuple[str, StashSetup]:
    more = {"attention": attention, "softmax": attention, "activation": activation, "layernorm": norm}
    name = ", ".join(f"{kind} {4 + n}" for kind, n in more.items() if n and kind != "softmax")
    return name, StashSetup("bfp", {"bits": 4}, more)


SETUPS = {
    "linears alone, 4": StashSetup("bfp", {"bits": 4}, rows=_LINEAR),
    **{f"all at {bits}": StashSetup("bfp", {"bits": bits}) for bits in (4, 5, 6, 8)},
    **dict(_more(*bits) for bits in ((2, 0, 0), (1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1), (2, 2, 2), (3, 2, 2))),
    "all at 4, stochastic": StashSetup("bfp", {"bits": 4, "rounding": "stochastic"}),
    "mesa": StashSetup("mesa", {}),
    "gact 4": StashSetup("gact", {"bits": 4}),
    **{f"gact {bits}, snvint": StashSetup("gact", {"bits": bits, "format": "snvint"}) for bits in (4, 5)},
}


def gradient(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """The gradient of all parameters in one row, and the bytes kept. ``batch``: characters and one more, (B, T + 1)."""
    model.zero_grad()
    held = dsq.stash.measure(lambda: model(batch[:, :-1]).float().mean()).nbytes
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), held


def errors(model: nn.Module, batches: list[Tensor], updates: int) -> list[dict[str, Any]]:
    """A row a setup: its gradients of the batches against the exact ones."""
    rows = []
    exact = [gradient(model, batch)[0] for batch in batches]
    size = sum(float(g.square().sum()) for g in exact)
    for name, setup in SETUPS.items():
        adapts = 2 * batches[:1] if setup.policy == "gact" else []
        controller = setup.applied(model)
        found = [gradient(model, batch) for batch in (*adapts, *batches)][len(adapts) :]
        controller.remove()
        off = sum(float((g - e).square().sum()) for (g, _), e in zip(found, exact, strict=True))
        bits = 8 * found[-1][1] / VALUES
        rows.append({"updates": updates, "setup": name, "error": (off / size) ** 0.5, "bits": bits})
        print(updates, name, f"{bits:.1f} bits, error {rows[-1]['error']:.4f}", flush=True)
    return rows


def run(data: list[Path]) -> None:
    files = locate(TASK, data)
    torch.manual_seed(0)
    problem, judging = make(TASK, 0, files), make(TASK, 1, files)
    fixed = list(islice(judging.batches, 4))
    optimizer = torch.optim.AdamW(problem.model.parameters(), 1e-3)
    rows: list[dict[str, Any]] = []
    for update, batch in zip(range(1, max(UPDATES) + 1), problem.batches, strict=False):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, update / 100)
        F.cross_entropy(*problem.predict(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update in UPDATES:
            rows += errors(problem.model, fixed, update)
            write_text(OUT, as_csv(rows))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.stash.bits", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR", help="as of analysis.evidence")
    given = parser.parse_args(argv)
    return guarded(parser.prog, lambda: run(given.data))


if __name__ == "__main__":
    sys.exit(main())
