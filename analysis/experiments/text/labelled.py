"""Reads labelled sentences, or pairs of them: TASK.train.tsv and TASK.dev.tsv, plain or .xz or .gz.

GLUE's own files do too: TASK/train.tsv, with GLUE's names of columns.
"""

from dataclasses import dataclass
from pathlib import Path

from analysis.experiments.text.lines import read_lines

#: those of MNLI and of QNLI
_OWN_NAMES = {"gold_label": "label", "question": "sentence1"}


@dataclass(frozen=True)
class LabelledSentences:
    """Labelled sentences, or pairs of sentences."""

    labels: list[str]
    inputs: list[list[str]]  #: for each input column (one or two), its sentences

    @property
    def columns(self) -> list[list[str]]:
        return [self.labels, *self.inputs]


def read_labelled(folder: Path, task: str, split: str) -> LabelledSentences:
    """``folder/TASK.SPLIT.tsv``, or GLUE's ``folder/TASK/SPLIT.tsv``. Raises ValueError where it is missing,
    empty, damaged, or has other columns or a row of other length than the first."""
    stems = [folder / f"{task}.{split}", *(folder / task.upper() / name for name in (split, f"{split}_matched"))]
    found = [path for stem in stems for end in ("", ".xz", ".gz") if (path := Path(f"{stem}.tsv{end}")).is_file()]
    accepted = f"{task}.{split}.tsv (or .xz, .gz) with columns label and sentence, or label, sentence1 and sentence2"
    if not found:
        raise ValueError(f"--data {folder}: no {accepted}")
    if len(found) > 1:
        several = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ValueError(f"--data {folder}: {split} of {task} is there more than once: {several}")
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(found[0]), start=1) if line]
    head, rows = lines[0][1] if lines else [], lines[1:]
    names = [_OWN_NAMES.get(name, name) for name in head]
    if "question" in head:  # QNLI, whose answer is called sentence
        names = ["sentence2" if name == "sentence" else name for name in names]
    columns = [name for name in ("sentence", "sentence1", "sentence2") if name in names]
    if "label" not in names or columns not in (["sentence"], ["sentence1", "sentence2"]) or not rows:
        raise ValueError(f"{found[0]}: has {len(rows)} rows of {head}, expected {accepted}")
    for number, cells in rows:
        if len(cells) != len(head):
            raise ValueError(f"{found[0]} line {number}: has {len(cells)} column(s), expected {len(head)} between tabs")
    table = dict(zip(names, zip(*(cells for _, cells in rows), strict=True), strict=True))
    return LabelledSentences([label.strip() for label in table["label"]], [list(table[name]) for name in columns])
