"""A translation model from text to BLEU: BPE (sentencepiece), dsq-preprocess, dsq-train, dsq-generate, sacrebleu."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from analysis import ROOT, make_folder
from analysis.translation.text import Pair, train_bpe
from dsq.command import write_text

SPLITS = ("train", "valid", "test")
#: flags that this file relies on
_FIXED = "--task translation --share-all-embeddings --no-epoch-checkpoints --no-progress-bar --log-format json"
#: flags that are given unless the caller's, which come later, say otherwise: a model for one CPU core
_DEFAULTS = """
    --arch transformer --encoder-layers 3 --decoder-layers 3 --encoder-embed-dim 128 --decoder-embed-dim 128
    --encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4
    --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam
    --adam-betas (0.9,0.98) --clip-norm 1.0 --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 400
    --max-tokens 2048 --max-epoch 10 --seed 1 --num-workers 0 --log-interval 20"""
#: a validation in the log of dsq-train --log-format json
_VALID = re.compile(r"\| INFO \| valid \| (\{.*\})$")


@dataclass(frozen=True)
class Text:
    """Parallel text."""

    pairs: Mapping[str, Sequence[Pair]]  #: by split, of SPLITS
    source: str  #: language
    target: str  #: language
    vocab: int  #: BPE subwords, of both languages together

    @property
    def digest(self) -> str:
        """The start of a SHA-256 of all that the binary form depends on."""
        digest = hashlib.sha256(f"{self.source} {self.target} {self.vocab}".encode())
        for split, pairs in self.pairs.items():
            digest.update(f"{split} {len(pairs)}\n".encode())
            for pair in pairs:
                digest.update("\t".join(pair).encode() + b"\n")
        return digest.hexdigest()[:12]

    def side(self, split: str, language: str) -> list[str]:
        """One language's sentences of a split."""
        return [pair[language == self.target] for pair in self.pairs[split]]


@dataclass(frozen=True)
class Trained:
    """A training that has ended."""

    valid_losses: list[tuple[int, float]]  #: updates, bits a subword with label smoothing
    seconds: float  #: of dsq-train
    bleu: float  #: sacrebleu's, of the test text
    translations: list[str]  #: of the test text
    checkpoint: Path  #: the one of the least validation loss, which translated


def prepare(text: Text, folder: Path) -> Path:
    """Binarize the text in a folder under ``folder``, once. Returns what dsq-train reads. Processes take turns."""
    folder_of_data = folder / text.digest
    make_folder(folder_of_data)
    with FileLock(folder_of_data / ".turn"):
        if not (folder_of_data / "done").exists():
            for part in ("pieces", "binary"):  # of a preparation that was killed
                shutil.rmtree(folder_of_data / part, ignore_errors=True)
            _binarize(text, folder_of_data)
            write_text(folder_of_data / "done", "")
    return folder_of_data / "binary"


def _binarize(text: Text, folder: Path) -> None:
    languages = text.source, text.target
    bpe = train_bpe([line for language in languages for line in text.side("train", language)], text.vocab)
    pieces = folder / "pieces"
    pieces.mkdir()
    for split in text.pairs:
        for language in languages:
            lines = (f"{' '.join(words)}\n" for words in bpe.encode(text.side(split, language), out_type=str))
            (pieces / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    flags = ["--source-lang", text.source, "--target-lang", text.target, "--joined-dictionary"]
    flags += [f"--{split}pref={pieces / split}" for split in text.pairs]
    fairseq("preprocess", [*flags, "--destdir", str(folder / "binary")], folder / "preprocess.log")


def train(text: Text, binary: Path, out: Path, levels: str, flags: Sequence[str], beam: int) -> Trained:
    """Train in the new folder ``out``, and translate the test text with the best checkpoint.

    Args:
        binary: what ``prepare`` returned for the text.
        levels: of DSQConfig; "": in floating point.
        flags: of dsq-train besides; they override _DEFAULTS.
    Raises:
        ValueError: a command's own line, where a flag or the text is a mistake.
        RuntimeError: a command failed otherwise.
    """
    from sacrebleu.metrics.bleu import BLEU

    make_folder(out)
    started, checkpoints = time.perf_counter(), out / "checkpoints"
    fairseq("train", [*own_flags(binary, checkpoints, levels), *flags], out / "train.log")
    seconds = time.perf_counter() - started
    best = checkpoints / "checkpoint_best.pt"
    search = ["--beam", str(beam), "--batch-size", "128", "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    device = ["--cpu"] if "--cpu" in flags else []
    fairseq("generate", [str(binary), "--path", str(best), *search, *device], out / "generate.log")
    translations = hypotheses(out / "generate.log")
    return Trained(
        valid_losses(out / "train.log"),
        seconds,
        round(BLEU().corpus_score(translations, [text.side("test", text.target)]).score, 2),
        translations,
        best,
    )


def own_flags(binary: Path, checkpoints: Path, levels: str) -> list[str]:
    """Return what dsq-train is given before a caller's flags."""
    arguments = [str(binary), "--save-dir", str(checkpoints), *_FIXED.split(), *_DEFAULTS.split()]
    return [*arguments, *(["--dsq-levels", levels] if levels else [])]


def fairseq(command: str, arguments: Sequence[str], log: Path) -> None:
    """Run dsq-``command`` in a process of this checkout, on one thread; it writes to ``log``.

    Raises ValueError with the command's own line where it found a mistake of the user's (exit status 2), and
    RuntimeError with its last line where it failed otherwise.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "fairseq_plugin.commands", command, *arguments],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2].strip()
        if done.returncode == 2:
            raise ValueError(last)
        raise RuntimeError(f"dsq-{command} failed with exit status {done.returncode}: {last}")


def valid_losses(log: Path) -> list[tuple[int, float]]:
    """Updates and losses of the validations that dsq-train logged."""
    lines = log.read_text(encoding="utf-8").splitlines()
    records = [json.loads(match[1]) for line in lines if (match := _VALID.search(line))]
    return [(int(one["valid_num_updates"]), float(one["valid_loss"])) for one in records]


def hypotheses(log: Path) -> list[str]:
    """The translations of dsq-generate's output, in the order of the test text."""
    texts: dict[int, str] = {}
    for line in log.read_text(encoding="utf-8").split("\n"):
        if line.startswith("D-"):
            number, _, text = line.split("\t")
            texts[int(number[2:])] = text
    return [texts[number] for number in sorted(texts)]
