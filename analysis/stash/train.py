"""Does a classifier trained with a stash policy reach the accuracy of fp32?

    python -m analysis.stash.train --data DIR --task sst2 --out RUN
    python -m analysis.stash.train --data DIR --task mrpc --out RUN --seeds 1 2 --runs fp32 mesa "gact 4"

DIR holds TASK.train.tsv and TASK.dev.tsv, plain or .xz or .gz: a header, and label with sentence or with sentence1 and
sentence2. The model is small and starts from random weights: words -> embeddings -> pre-LN encoder blocks -> mean over
words -> classes. Within one seed all runs have the same initial weights, batches, order and dropout. Batches hold
sentences of one length, so no position is padding; their shape changes from step to step.

RUN/accuracy.csv: a row a run and seed. RUN/table.md: means over the seeds, and the differences from fp32 of the same
seed.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from itertools import count as count_from
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.experiments.text import LabelledSentences, read_labelled
from analysis.models import encoder
from dsq import stash
from dsq.command.files import make_folder, write_text
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import as_csv, table
from dsq.stash.wtacrs.controller import WTACRS

PROG = "python -m analysis.stash.train"
#: what each run applies, in order
RUNS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "fp32": (),
    "bfp 4": (("bfp", {"bits": 4, "format": "bfp"}),),
    "bfp 2": (("bfp", {"bits": 2, "format": "bfp"}),),
    "mesa": (("mesa", {}),),
    "gact 4": (("gact", {"bits": 4, "adapt_interval": 200}),),
    "gact 2": (("gact", {"bits": 2, "adapt_interval": 200}),),
    "gact 4 of bfp": (("gact", {"bits": 4, "adapt_interval": 200, "format": "bfp"}),),
    "selective": (("selective", {}),),
    "wtacrs 0.3": (("wtacrs", {"ratio": 0.3}),),
    "wtacrs 0.3 + bfp 4": (("wtacrs", {"ratio": 0.3}), ("bfp", {"bits": 4, "format": "bfp"})),
    "checkpoint + bfp 4": (("checkpoint", {}), ("bfp", {"bits": 4, "format": "bfp"})),
}
LONGEST = 64  #: words of a sentence that are read


class Classifier(nn.Module):
    """words (B, T) -> scores (B, classes)."""

    def __init__(self, words: int, classes: int, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LONGEST, width)
        self.drop = nn.Dropout(0.1)
        self.encoder = encoder(blocks, width, heads=4, ffn=4 * width, dropout=0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTD = self.words(words_BT) + self.places.weight[: words_BT.shape[1]]
        return self.head(self.encoder(self.drop(x_BTD)).mean(1))


@dataclass(frozen=True)
class Sentences:
    """A split as numbers."""

    words: list[list[int]]
    labels: list[int]

    def batches(self, size: int, seed: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(numbers of the samples, words (B, T), labels (B,)), each batch of one length; the seed decides the order."""
        order = list(range(len(self.words)))
        generator = torch.Generator().manual_seed(seed or 0)
        if seed is not None:
            order = torch.randperm(len(order), generator=generator).tolist()
        by_length: dict[int, list[int]] = {}
        for sample in order:
            by_length.setdefault(len(self.words[sample]), []).append(sample)
        cut = [same[i : i + size] for same in by_length.values() for i in range(0, len(same), size)]
        for number in torch.randperm(len(cut), generator=generator).tolist():
            samples = cut[number]
            words = torch.tensor([self.words[sample] for sample in samples])
            yield torch.tensor(samples), words, torch.tensor([self.labels[sample] for sample in samples])


def read(folder: Path, task: str) -> tuple[Sentences, Sentences, int, int]:
    """(train, dev, size of the vocabulary, classes). Words: those seen three times in train, and one for the rest."""
    tables = [read_labelled(folder, task, split) for split in ("train", "dev")]
    texts = [_texts(table) for table in tables]
    seen = Counter(word for text in texts[0] for word in text)
    number = {word: index + 1 for index, word in enumerate(word for word, count in seen.items() if count >= 3)}
    classes = {label: index for index, label in enumerate(sorted(set(tables[0].labels)))}
    words = [[[number.get(word, 0) for word in text] for text in split] for split in texts]
    labels = [[classes[label] for label in table.labels] for table in tables]
    train, dev = map(Sentences, words, labels)
    return train, dev, len(number) + 1, len(classes)


def _texts(split: LabelledSentences) -> list[list[str]]:
    rows = zip(*split.inputs, strict=True)
    return [" [and] ".join(columns).lower().split()[:LONGEST] or ["."] for columns in rows]


def train(
    model: nn.Module, data: Sentences, steps: int, size: int, rate: float, seed: int, sampled: WTACRS | None
) -> float:
    """A plain loop; returns its seconds. ``sampled`` is told the samples of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    model.train()
    began = time.perf_counter()
    epochs = chain.from_iterable(data.batches(size, 1000 * seed + epoch) for epoch in count_from(0))
    for samples, words, labels in islice(epochs, steps):
        if sampled:
            sampled.set_sample_ids(samples)
        loss = F.cross_entropy(model(words), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return time.perf_counter() - began


@torch.no_grad()
def accuracy(model: nn.Module, data: Sentences) -> float:
    """In %."""
    model.eval()
    right = sum(int((model(words).argmax(1) == labels).sum()) for _, words, labels in data.batches(256, None))
    return 100 * right / len(data.labels)


def run(name: str, seed: int, args: argparse.Namespace, data: tuple[Sentences, Sentences, int, int]) -> dict[str, Any]:
    """Train once; a row of accuracy.csv."""
    train_set, dev, words, classes = data
    torch.manual_seed(seed)
    model = Classifier(words, classes, args.width, args.blocks)
    controllers = {policy: stash.apply(model, policy, **options) for policy, options in RUNS[name]}
    sampled = controllers.get("wtacrs")
    assert sampled is None or isinstance(sampled, WTACRS)
    seconds = train(model, train_set, args.steps, args.batch, args.lr, seed, sampled)
    model.train()
    batch, labels = torch.randint(words, (args.batch, 24)), torch.randint(classes, (args.batch,))
    if sampled:
        sampled.set_sample_ids(None)
    kept = stash.measure(lambda: F.cross_entropy(model(batch), labels)).nbytes
    percent = accuracy(model, dev)
    print(f"{name:20} seed {seed}  accuracy {percent:.2f} %  {seconds:.0f} s", flush=True)
    return {"run": name, "seed": seed, "accuracy": percent, "stash_bytes": kept, "seconds": round(seconds, 1)}


def means(rows: pd.DataFrame) -> str:
    """Means over the seeds. Differences from fp32 are of runs of one seed; spread is their standard deviation."""
    fp32 = rows[rows["run"] == "fp32"].set_index("seed")["accuracy"]
    lines = []
    for name, group in rows.groupby("run", sort=False):
        accuracy, lost = group["accuracy"], group.set_index("seed")["accuracy"] - fp32  # NaN without fp32
        line = {"run": name, "accuracy, %": accuracy.mean(), "lowest": accuracy.min(), "highest": accuracy.max()}
        line |= {"minus fp32": lost.mean(), "spread": lost.std(), "stash, MiB": group["stash_bytes"].mean() / 2**20}
        lines.append(line | {"seconds": group["seconds"].mean()})
    return table(lines, {name: "" if name == "run" else ".2f" for name in lines[0]}, markdown=True)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = OneLineParser(prog=PROG, description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--task", default="sst2", help="name of the files in DIR (default: sst2)")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=count, default=800)
    parser.add_argument("--batch", type=count, default=64, help="sentences of a batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--blocks", type=count, default=2)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args(argv)
    return guarded(PROG, lambda: _work(args))


def _work(args: argparse.Namespace) -> None:
    if args.width < 4 or args.width % 4:
        raise ValueError(f"--width {args.width}: accepted are multiples of 4, the number of heads")
    data = read(args.data, args.task)
    make_folder(args.out)
    csv = args.out / "accuracy.csv"
    done: list[dict[str, Any]] = pd.read_csv(csv).to_dict("records") if csv.exists() else []  # type: ignore[assignment]
    known = {(row["run"], row["seed"]) for row in done}
    for seed in args.seeds:
        for name in args.runs:
            if (name, seed) not in known:
                done.append(run(name, seed, args, data))
                write_text(csv, as_csv(done, ""))
    text = means(pd.DataFrame(done))
    write_text(args.out / "table.md", text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
