"""The data of a training: its text, the subwords that it is cut into, and the binary form that fairseq reads."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.experiments import text
from analysis.experiments.fairseq_run import fairseq
from analysis.experiments.text import ParallelText
from dsq.command import make_folder, turn_at, write_text

KINDS = ("parallel",)
#: fields of Data that say where the text lies, and not what it is
_WHEREABOUTS = ("path", "get")


@dataclass(frozen=True)
class Data:
    """The data of a training: a recipe's [data], and "data" in run.json, have these fields."""

    kind: str  #: one of KINDS: parallel text, which is translated
    path: str  #: the folder of the text
    vocab: int = 4000  #: BPE subwords
    prefix: str = ""  #: the start of the files' names, as in PREFIX.train.tsv.xz
    source: str = "de"  #: language
    target: str = "en"  #: language
    columns: str = "de,en"  #: languages of a .tsv's columns
    lowercase: bool = False  #: lower-case all text, the references too
    beam: int = 4  #: of the search
    get: str = ""  #: where a person gets the data; shown where they are absent

    def settings(self) -> dict[str, Any]:
        """The settings that a training's numbers depend on."""
        return {key: value for key, value in asdict(self).items() if key not in _WHEREABOUTS}

    def read(self) -> dict[str, ParallelText]:
        """The text by split. Raises ValueError for text that cannot be used."""
        columns = tuple(self.columns.split(","))
        return text.read_parallel(Path(self.path), self.source, self.target, self.prefix, columns, self.lowercase)

    def check_present(self) -> None:
        """Raise ValueError, with where to get them, where the data are absent."""
        if not Path(self.path).is_dir():
            raise ValueError(f"data.path {self.path}: there is no such folder; give --data DIR. {self.get}".strip())


def prepare(data: Data, folder: Path) -> str:
    """Fill ``folder/binary`` with the binary text that dsq-train reads, unless it is there; processes take turns.

    Returns the SHA-256 of the text. Raises ValueError where the folder was made with other settings or of other text.
    """
    found = data.read()
    make_folder(folder)
    with turn_at(folder):
        return _prepare(data, found, folder)


def _prepare(data: Data, found: dict[str, ParallelText], folder: Path) -> str:
    record, now = folder / "data.json", {**data.settings(), "text_sha256": text.sha256(found)}
    written = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    made = {key: value for key, value in written.items() if key in now}  # there were more settings once
    if "text_sha256" not in made:  # what a killed preparation left may be of other settings
        shutil.rmtree(folder / "binary", ignore_errors=True)
        _binarise(data, found, folder)
        write_text(record, json.dumps(now, indent=1) + "\n")
    elif made["text_sha256"] == now["text_sha256"] and made != now:
        raise ValueError(f"{folder}: was prepared with other settings than the recipe's data: give another --out")
    elif made != now:
        raise ValueError(f"{folder}: was made of other text than --data has now: put that back, or give another --out")
    return now["text_sha256"]


def _binarise(data: Data, found: dict[str, ParallelText], folder: Path) -> None:
    sizes = ", ".join(f"{split} {len(part.source)}" for split, part in found.items())
    print(f"preparing {data.source}-{data.target}: {sizes} sentence pairs, {data.vocab} subwords", flush=True)
    bpe = text.train_bpe([*found["train"].source, *found["train"].target], data.vocab)
    pieces = folder / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    (pieces / "bpe.model").write_bytes(bpe.serialized_model_proto())
    for split, part in found.items():
        for side, language in ((part.source, data.source), (part.target, data.target)):
            lines = (f"{' '.join(words)}\n" for words in bpe.encode(side, out_type=str))
            (pieces / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    languages = ["--source-lang", data.source, "--target-lang", data.target, "--joined-dictionary"]
    texts = [f"--{split}pref={pieces / split}" for split in found]
    fairseq("preprocess", [*languages, *texts, "--destdir", str(folder / "binary")], folder / "preprocess.log")
