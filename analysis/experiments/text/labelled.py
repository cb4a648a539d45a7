"""Reads labelled sentences, or pairs of them: TASK.train.tsv and TASK.dev.tsv, plain or .xz or .gz.

GLUE's own files do too: TASK/train.tsv, with GLUE's names of columns.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import pandas as pd


@dataclass(frozen=True)
class LabelledSentences:
    """Labelled sentences, or pairs of sentences."""

    labels: list[str]
    inputs: list[list[str]]  #: for each input column (one or two), its sentences


def read_labelled(folder: Path, task: str, split: str) -> LabelledSentences:
    """``folder/TASK.SPLIT.tsv``, or GLUE's ``folder/TASK/SPLIT.tsv``. Raises ValueError where it is missing,
    empty or has other columns."""
    stems = [folder / f"{task}.{split}", *(folder / task.upper() / name for name in (split, f"{split}_matched"))]
    found = [path for stem in stems for end in ("", ".xz", ".gz") if (path := Path(f"{stem}.tsv{end}")).is_file()]
    accepted = f"{task}.{split}.tsv (or .xz, .gz) with columns label and sentence, or label, sentence1 and sentence2"
    if not found:
        raise ValueError(f"--data {folder}: no {accepted}")
    frame = pd.read_csv(found[0], sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, dtype=str)
    if "question" in frame:  # QNLI
        frame = frame.rename(columns={"question": "sentence1", "sentence": "sentence2"})
    frame = frame.rename(columns={"gold_label": "label"})  # MNLI
    columns = [name for name in ("sentence", "sentence1", "sentence2") if name in frame]
    if "label" not in frame or columns not in (["sentence"], ["sentence1", "sentence2"]) or frame.empty:
        raise ValueError(f"{found[0]}: has {len(frame)} rows of {list(frame.columns)}, expected {accepted}")
    return LabelledSentences(frame["label"].tolist(), [frame[column].tolist() for column in columns])
