"""The suite's problems: a language model, a sentence classifier, a pretrained encoder and classifiers of images, which
PyTorch's loop trains. Translations: translations.py.
"""

import gzip
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analysis.evidence import graphs, loop, translations
from analysis.evidence.loop import Problem, Result, train
from analysis.evidence.suite import Setting, Task
from analysis.models import GPT, Classifier, encoder, resnet20
from analysis.translation.text import LabeledSentences, read_labeled, train_bpe

#: windows, sentences or images of a batch that is judged
JUDGED = 200
RARE = 10  #: a character that is seen less often is one of the rest


def run_once(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path, device: str = "cpu") -> Result:
    """Train once, or ``task.sizes["repeats"]`` times from seeds of their own for the mean.

    Raises ValueError where the setting cannot be put on the task's model, or the task runs on the CPU alone.
    """
    if device != "cpu" and task.kind in ("translation", "graph"):
        raise ValueError(f"--device {device}: {task.name}, of the kind {task.kind}, runs on the CPU alone")
    if task.kind == "translation":
        return translations.train(task, setting, seed, files, work)
    results = []
    for repeat in range(task.sizes.get("repeats", 1)):
        torch.manual_seed(100 * seed + repeat)
        problem = loop.on(make(task, 100 * seed + repeat, files), torch.device(device))
        results.append(train(problem, task, setting))
    return Result(fmean(one.loss for one in results), fmean(one.score for one in results), results[0].saved_mib)


def steps(task: Task, setting: Setting, seed: int, files: Sequence[Path], work: Path) -> Callable[[], Any]:
    """Return the next step of the task's training under the setting, by the loop that ``run_once`` trains it with."""
    if task.kind == "translation":
        return translations.steps(task, setting, seed, files, work)
    return loop.steps(make(task, seed, files), task, setting)


def make(task: Task, seed: int, files: Sequence[Path]) -> Problem:
    """The task's model, its weights drawn from torch's generator, and its batches in the order that ``seed`` gives."""
    kinds = {"language": language, "sentences": sentences, "finetuning": finetuning, "images": images}
    return (kinds | {"graph": graphs.nodes})[task.kind](task, torch.Generator().manual_seed(seed), files)


def language(task: Task, generator: torch.Generator, files: Sequence[Path]) -> Problem:
    """A GPT on the characters of a text, or on ``vocab`` subwords. The last tenth of a single file validates."""
    texts = [lzma.decompress(file.read_bytes()).decode() for file in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
    vocabulary, (train, valid) = _tokens(texts, task.sizes.get("vocab", 0))
    context, places = task.sizes["context"], torch.arange(task.sizes["context"] + 1)
    width, blocks, heads = (task.sizes[name] for name in ("width", "blocks", "heads"))
    model = GPT(vocabulary, context, width, blocks, heads, task.dropout)
    windows = valid[: len(valid) // (context + 1) * (context + 1)].view(-1, context + 1)
    judged = windows[:: -(-len(windows) * context // 50_000)]  # some 50,000 tokens

    def predict(windows_BT: Tensor) -> tuple[Tensor, Tensor]:
        return model(windows_BT[:, :-1]).flatten(0, 1), windows_BT[:, 1:].flatten()

    starts = (torch.randint(len(train) - context, (task.batch, 1), generator=generator) for _ in count())
    batches = (train[start + places] for start in starts)
    return Problem(model, predict, batches, judged.split(max(1, 4096 // context)))


def _tokens(texts: Sequence[str], vocab: int) -> tuple[int, list[Tensor]]:
    """The size of the vocabulary, and each text in its tokens; the first text decides the vocabulary."""
    if vocab:
        bpe = train_bpe(texts[0].splitlines(), vocab)
        return vocab, [torch.tensor(bpe.encode(text)) for text in texts]
    seen = Counter(texts[0])
    number = {character: n for n, character in enumerate(sorted(c for c in seen if seen[c] >= RARE), start=1)}
    return len(number) + 1, [torch.tensor([number.get(character, 0) for character in text]) for text in texts]


def sentences(task: Task, generator: torch.Generator, files: Sequence[Path]) -> Problem:
    """A classifier from random weights, T5's encoder where the task has a ``config``; a batch holds sentences of one
    length."""
    train, dev, words, classes = read_sentences(files)
    model: nn.Module
    if task.config:
        model = _T5(task.config, words, classes)
    else:
        model = Classifier(words, classes, task.sizes["width"], task.sizes["blocks"])

    def predict(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[1]), batch[2]

    seeds = torch.randint(2**31, (1000,), generator=generator).tolist()
    batches = (batch for epoch in count() for batch in train.batches(task.batch, seeds[epoch % len(seeds)]))
    return Problem(model, predict, batches, list(dev.batches(JUDGED, None)), numbers=lambda batch: batch[0])


class _T5(nn.Module):
    """Words (B, T) -> scores (B, classes), of the mean of T5's encoder."""

    def __init__(self, config: Mapping[str, Any], words: int, classes: int) -> None:
        super().__init__()
        import transformers

        wanted: Any = transformers.AutoConfig.for_model(vocab_size=words, **config)
        self.encoder = transformers.T5EncoderModel(wanted)
        self.head = nn.Linear(wanted.hidden_size, classes)

    def forward(self, words_BT: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(words_BT).last_hidden_state.mean(1))
        return scores


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


def read_sentences(files: Sequence[Path]) -> tuple[Sentences, Sentences, int, int]:
    """(train, dev, size of the vocabulary, classes). Words: those seen three times in train, and one for the rest."""
    tables = [read_labeled(file) for file in files]
    texts = [_texts(table) for table in tables]
    seen = Counter(word for text in texts[0] for word in text)
    number = {word: index + 1 for index, word in enumerate(word for word, count in seen.items() if count >= 3)}
    classes = {label: index for index, label in enumerate(sorted(set(tables[0].labels)))}
    words = [[[number.get(word, 0) for word in text] for text in split] for split in texts]
    labels = [[classes[label] for label in table.labels] for table in tables]
    train, dev = map(Sentences, words, labels)
    return train, dev, len(number) + 1, len(classes)


def _texts(split: LabeledSentences) -> list[list[str]]:
    rows = zip(*split.inputs, strict=True)
    return [" [and] ".join(columns).lower().split()[: Classifier.LONGEST] or ["."] for columns in rows]


def finetuning(task: Task, generator: torch.Generator, files: Sequence[Path]) -> Problem:
    """A pretrained encoder of transformers, of which the head alone is new.

    Where ``sizes`` has a rank, PEFT's LoRA of all linear layers is trained in place of the encoder's weights.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    *tables, folder = *map(read_labeled, files[:2]), files[2].parent
    classes = sorted(set(tables[0].labels))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(classes))
    if "rank" in task.sizes:
        import peft

        rank = task.sizes["rank"]
        wanted = peft.LoraConfig("SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        model = peft.get_peft_model(model, wanted)

    def samples(table: LabeledSentences) -> list[dict[str, Any]]:
        pieces = tokenizer(*table.inputs, truncation=True, max_length=128)
        columns = [pieces[name] for name in pieces] + [list(map(classes.index, table.labels))]
        return [dict(zip([*pieces, "labels"], one, strict=True)) for one in zip(*columns, strict=True)]

    train, dev = samples(tables[0]), sorted(samples(tables[1]), key=lambda one: len(one["input_ids"]))

    def batch(rows: Sequence[dict[str, Any]]) -> Any:
        return tokenizer.pad(list(rows), return_tensors="pt")

    def predict(batch: Any) -> tuple[Tensor, Tensor]:
        inputs = {name: values for name, values in batch.items() if name != "labels"}
        return model(**inputs).logits, batch["labels"]

    batches = (batch([train[i] for i in indices]) for indices in _shuffled(len(train), task.batch, generator))
    return Problem(model, predict, batches, [batch(dev[i : i + 64]) for i in range(0, len(dev), 64)])


class ViT(nn.Module):
    """Images (B, 1, 28, 28) -> logits (B, 10): patches of 4 x 4, pre-LN blocks, the mean over patches."""

    def __init__(self, width: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.places = nn.Parameter(torch.randn(49, width) * 0.02)
        self.encoder = encoder(blocks, width, heads, 4 * width, dropout, sdpa=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.patches(x_BCHW).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.encoder(x_BTD).mean(1))
        return logits


class _Transformers(nn.Module):
    """A classifier of images by transformers' configuration of it, with random weights."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        import transformers

        wanted = transformers.AutoConfig.for_model(**config)
        self.model = transformers.AutoModelForImageClassification.from_config(wanted)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.model(x_BCHW).logits
        return logits


def images(task: Task, generator: torch.Generator, files: Sequence[Path]) -> Problem:
    """A model of transformers by its ``config``, a ViT where ``sizes`` has blocks, else ResNet-20, on the first images
    of a set in MNIST's form."""
    x, y, x_held_out, y_held_out = (_idx(file) for file in files)
    x, y = x[: task.sizes["images"]], y[: task.sizes["images"]]
    x_held_out, y_held_out = x_held_out[: task.sizes["held_out"]], y_held_out[: task.sizes["held_out"]]
    model: nn.Module
    width = task.sizes.get("width", 0)
    if task.config:
        model = _Transformers(task.config)
    elif "blocks" in task.sizes:
        model = ViT(width, task.sizes["blocks"], task.sizes["heads"], task.dropout)
    else:
        model = resnet20((width, 2 * width, 4 * width), channels=1)

    def predict(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model((batch[0][:, None].float() - 73) / 90), batch[1].long()

    batches = ((x[indices], y[indices]) for indices in _shuffled(len(x), task.batch, generator))
    held_out = list(zip(x_held_out.split(JUDGED), y_held_out.split(JUDGED), strict=True))
    return Problem(model, predict, batches, held_out)


def _idx(file: Path) -> Tensor:
    """The array of a file in MNIST's form: two zeros, 8, the number of sizes, each size as a big-endian word, bytes."""
    content = gzip.decompress(file.read_bytes())
    sizes = np.frombuffer(content, ">i4", content[3], offset=4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(sizes).copy())


def _shuffled(samples: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Whole batches of indices, each epoch in a new order, without an end."""
    while True:
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples // size * size].split(size)
