"""How far each setting moves the gradient of a small translation model, along its training; the limits of dsq.report's
verdict come from it: python -m analysis.gradients multi30k.train.tsv

The model is nn.Transformer, 3 + 3 layers of width 128 with fused attention. The file has a pair of sentences a line,
with a tab between them; words are what spaces separate.
"""

import copy
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.attach import attach
from analysis.translation.text import read_lines
from dsq.command import OneLineParser, guarded, table
from dsq.gradient_check import compare

WIDTH, WORDS, LONGEST, BATCH, PAIRS = 128, 5000, 24, 64, 12_000
AT = (100, 200, 500)  #: updates of a training in fp32, before which gradients are compared
Batch = tuple[Tensor, Tensor]

#: as analysis/attach.py names them
SETTINGS = (
    *(f"[{levels}]" for levels in ("8,8,8,8", "8,4,4,8", "4,4,4,8", "4,3,3,8", "3,3,3,8", "2,2,2,2")),
    *(f"[8,4,4,8] + {policy}" for policy in ("snvint 4", "snvint 8", "mesa", "gact 4")),
    "snvint 4",
)


class Translator(nn.Module):
    """Loss of a batch of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH, 0), nn.Embedding(WORDS, WIDTH, 0)
        self.places = nn.Embedding(LONGEST + 2, WIDTH)
        for embedding in (self.source, self.target, self.places):
            nn.init.normal_(embedding.weight, std=WIDTH**-0.5)
        self.transformer = nn.Transformer(WIDTH, 4, 3, 3, 4 * WIDTH, 0.1, batch_first=True)
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # so that attention is fused
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given, wanted = target[:, :-1], target[:, 1:]
        x, y = (
            F.dropout(words(ids) * WIDTH**0.5 + self.places.weight[: ids.shape[1]], 0.1, self.training)
            for words, ids in ((self.source, source), (self.target, given))
        )
        pads = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
        later = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).triu(1)
        h = self.transformer(x, y, tgt_mask=later, tgt_key_padding_mask=given == 0, **pads)
        return F.cross_entropy(self.out(h).flatten(0, 1), wanted.flatten(), ignore_index=0, label_smoothing=0.1)


def batches(path: Path) -> Iterator[Batch]:
    """Random batches of the first pairs of a file, without end."""
    rows = [[side.lower().split() for side in line.split("\t")[:2]] for line in read_lines(path)[: 2 * PAIRS]]
    rows = [row for row in rows if all(3 <= len(side) <= LONGEST for side in row)][:PAIRS]
    counts = [Counter(itertools.chain.from_iterable(row[side] for row in rows)) for side in (0, 1)]
    ids = [{word: i for i, (word, _) in enumerate(c.most_common(WORDS - 4), 4)} for c in counts]
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = [rows[i] for i in torch.randint(len(rows), (BATCH,), generator=generator).tolist()]
        sides = [[torch.tensor([1, *(ids[s].get(w, 3) for w in row[s]), 2]) for row in chosen] for s in (0, 1)]
        source, target = (nn.utils.rnn.pad_sequence(side, batch_first=True) for side in sides)
        yield source, target


def checks(model: nn.Module, batch: Batch, update: int) -> Iterator[dict[str, Any]]:
    """A row a setting, and one of bf16 autocast."""
    plain = copy.deepcopy(model)
    for name in SETTINGS:
        changed = copy.deepcopy(plain)
        attach(changed, name)
        yield row(update, name, changed, partial(changed, *batch))
    casts = itertools.cycle((False, True))  # compare's first pass is the plain one

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=next(casts)):
            return plain(*batch)

    yield row(update, "bf16 autocast", plain, loss)


def row(update: int, name: str, model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Any]:
    found = compare(model, loss)
    judged = [p for p in found.parameters if p.judged]
    ratio = max(judged, key=lambda p: max(p.ratio, 1 / max(p.ratio, 1e-9))).ratio
    figures = {"error": found.error, "of stash": found.of_stash, "worst cosine": found.cosine}
    return {"update": update, "setting": name, **figures, "worst ratio": ratio, "grade": found.grade}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.gradients", description=__doc__)
    parser.add_argument("file", type=Path, help="pairs of sentences, text or .xz")
    given = parser.parse_args(argv)

    def work() -> None:
        torch.manual_seed(1)
        warnings.simplefilter("ignore")  # few bits may damage training: that is the question
        model = Translator()
        optimizer = torch.optim.Adam(model.parameters(), 5e-4, betas=(0.9, 0.98))
        rows: list[dict[str, Any]] = []
        for update, batch in zip(range(max(AT) + 1), batches(given.file), strict=False):
            if update in AT:
                rows += checks(model, batch, update)
            optimizer.param_groups[0]["lr"] = 5e-4 * min(1, (update + 1) / 100)
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
        formats = {"update": "", "setting": "", "error": ".3f", "of stash": ".3f", "worst cosine": ".3f"}
        print(table(rows, formats | {"worst ratio": ".2f", "grade": ""}, markdown=True))
        print(f"loss {loss.item():.3f} at update {update}")

    return guarded(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
