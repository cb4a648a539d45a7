"""The data of a training: what text it reads, how the text is cut into subwords, and its binary form for fairseq."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from analysis.experiments import text
from analysis.experiments.fairseq_run import fairseq
from analysis.experiments.text import LabelledSentences, ParallelText
from dsq.command import make_folder, turn_at, write_text

KINDS = ("parallel", "labelled")
#: the files of fairseq's pretrained RoBERTa
PRETRAINED = ("model.pt", "dict.txt", "encoder.json", "vocab.bpe")
#: SHA-256 of the files that are GPT-2's, as tiktoken_ext/openai_public.py of github.com/openai/tiktoken has them
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
#: fields of Data that say where the text lies, and not what it is
_WHEREABOUTS = ("path", "get")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Data:
    """The data of a training: a recipe's [data], the flags of a command, and "data" in run.json have these fields."""

    kind: str  #: parallel text, which is translated, or labelled sentences, which are classified
    path: str  #: the folder of the text
    vocab: int = _field(4000, "BPE subwords")
    prefix: str = _field("", "parallel: what the files' names begin with, as in PREFIX.train.tsv.xz")
    source: str = _field("de", "parallel: source language")
    target: str = _field("en", "parallel: target language")
    columns: str = _field("de,en", "parallel: languages of a .tsv's columns")
    lowercase: bool = _field(False, "parallel: lower-case all text, the references too")
    beam: int = _field(4, "parallel: beam of the search")
    task: str = _field("", "labelled: what the tables' names begin with: sst2, rte, mrpc, ...")
    pretrained: str = _field("", f"labelled: folder of fairseq's RoBERTa to fine-tune: {', '.join(PRETRAINED)}")
    get: str = ""  #: where a person gets the data; shown where they are absent

    @property
    def translates(self) -> bool:
        return self.kind == "parallel"

    def settings(self) -> dict[str, Any]:
        """The settings that a training's numbers depend on."""
        return {key: value for key, value in asdict(self).items() if key not in _WHEREABOUTS}

    def read(self) -> dict[str, Any]:
        """split -> ParallelText or LabelledSentences. Raises ValueError for text that cannot be used."""
        if not self.translates:
            return text.read_tables(Path(self.path), self.task)
        columns = tuple(self.columns.split(","))
        return text.read_parallel(Path(self.path), self.source, self.target, self.prefix, columns, self.lowercase)

    def check_present(self) -> None:
        """Raise ValueError, with where to get them, where the data are absent or other than those published."""
        if not Path(self.path).is_dir():
            raise ValueError(f"data.path {self.path}: there is no such folder; give --data DIR. {self.get}".strip())
        for name in PRETRAINED if self.pretrained else ():
            path = Path(self.pretrained) / name
            if not path.is_file():
                raise ValueError(f"data.pretrained {self.pretrained}: there is no {name}. {self.get}".strip())
            if name in SHA256 and (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256[name]:
                raise ValueError(f"{path}: its SHA-256 is {found}, expected {SHA256[name]}, that of GPT-2's")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --data and a flag for each field of Data that has a help text."""
    parser.add_argument("--data", dest="path", required=True, metavar="DIR", help="directory of the text")
    for one in fields(Data):
        if "help" in one.metadata:
            given: dict[str, Any] = {"action": "store_true"} if one.type is bool else {"type": one.type}
            shown = "" if one.default in ("", False) else " (default: %(default)s)"
            parser.add_argument(f"--{one.name}", default=one.default, help=one.metadata["help"] + shown, **given)


def data_of(given: argparse.Namespace) -> Data:
    """The Data that the flags ask for: labelled sentences where there is a --task."""
    values = {one.name: getattr(given, one.name) for one in fields(Data) if hasattr(given, one.name)}
    return Data(kind="labelled" if given.task else "parallel", **values)


def prepare(data: Data, folder: Path) -> str:
    """Fill ``folder/binary`` for trainings, where that is still to be done; processes take turns.

    Returns the SHA-256 of the text. Raises ValueError where the folder was made with other settings or of other text.
    """
    found = data.read()
    make_folder(folder)
    with turn_at(folder):
        return _prepare(data, found, folder)


def _prepare(data: Data, found: dict[str, Any], folder: Path) -> str:
    record, now = folder / "data.json", {**data.settings(), "text_sha256": text.sha256(found)}
    made = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if "text_sha256" not in made:  # what a killed preparation left may be of other settings
        shutil.rmtree(folder / "binary", ignore_errors=True)
        (_binarise_pairs if data.translates else _binarise_tables)(data, found, folder)
        write_text(record, json.dumps(now, indent=1) + "\n")
    elif made["text_sha256"] == now["text_sha256"] and made != now:
        raise ValueError(f"{folder}: was prepared with other settings than the recipe's data: give another --out")
    elif made != now:
        raise ValueError(f"{folder}: was made of other text than --data has now: put that back, or give another --out")
    return now["text_sha256"]


def _binarise_pairs(data: Data, found: dict[str, ParallelText], folder: Path) -> None:
    sizes = ", ".join(f"{split} {len(part.source)}" for split, part in found.items())
    print(f"preparing {data.source}-{data.target}: {sizes} sentence pairs, {data.vocab} subwords", flush=True)
    bpe = text.train_bpe([*found["train"].source, *found["train"].target], data.vocab)
    pieces = _pieces_folder(folder)
    (pieces / "bpe.model").write_bytes(bpe.serialized_model_proto())
    for split, part in found.items():
        for side, language in ((part.source, data.source), (part.target, data.target)):
            _write(pieces / f"{split}.{language}", map(" ".join, bpe.encode(side, out_type=str)))
    languages = ["--source-lang", data.source, "--target-lang", data.target, "--joined-dictionary"]
    texts = [f"--{split}pref={pieces / split}" for split in found]
    fairseq("preprocess", [*languages, *texts, "--destdir", str(folder / "binary")], folder / "preprocess.log")


def _binarise_tables(data: Data, found: dict[str, LabelledSentences], folder: Path) -> None:
    """Write what fairseq's sentence_prediction reads: input0, input1 if there are pairs, label.

    Subwords are learnt of the training sentences, or those of the pretrained model.
    """
    words = {label for table in found.values() for label in table.labels if len(label.split()) != 1}
    if words:
        raise ValueError(f"--data: a label must be one word, got {min(words)!r}")  # fairseq's labels are words
    pieces = _pieces_folder(folder)
    encode = _pretrained_pieces(Path(data.pretrained), pieces) if data.pretrained else _own_pieces(data, found, pieces)
    for split, table in found.items():
        for number, column in enumerate(table.inputs):
            _write(pieces / f"{split}.input{number}", (" ".join(encode(sentence)) for sentence in column))
        _write(pieces / f"{split}.label", table.labels)
    for part in [*(f"input{number}" for number in range(len(found["train"].inputs))), "label"]:
        prefixes = [f"--{split}pref={pieces / split}.{part}" for split in found]
        dictionary = ["--srcdict", str(pieces / "dict.txt")] if part != "label" else []
        given = ["--only-source", *prefixes, *dictionary, "--destdir", str(folder / "binary" / part)]
        fairseq("preprocess", given, folder / "preprocess.log")


def _own_pieces(data: Data, found: dict[str, LabelledSentences], pieces: Path) -> Callable[[str], list[str]]:
    """What cuts a sentence into subwords learnt here; ``pieces`` gets the model and its dict.txt."""
    bpe = text.train_bpe([line for column in found["train"].inputs for line in column], data.vocab)
    (pieces / "bpe.model").write_bytes(bpe.serialized_model_proto())
    special = {"<unk>", "<s>", "</s>"}  # fairseq puts its own in front
    words = (bpe.id_to_piece(number) for number in range(bpe.get_piece_size()))
    _write(pieces / "dict.txt", (f"{word} 1" for word in words if word not in special))
    return lambda sentence: bpe.encode(sentence, out_type=str)


def _pretrained_pieces(pretrained: Path, pieces: Path) -> Callable[[str], list[str]]:
    """What cuts a sentence into the subwords of fairseq's RoBERTa, which are numbers of GPT-2's."""
    import fairseq_plugin  # noqa: F401 - its shims, before fairseq

    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder  # isort: skip

    bpe = get_encoder(str(pretrained / "encoder.json"), str(pretrained / "vocab.bpe"))
    shutil.copyfile(pretrained / "dict.txt", pieces / "dict.txt")
    return lambda sentence: [str(number) for number in bpe.encode(sentence)]


def _pieces_folder(folder: Path) -> Path:
    pieces = folder / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    return pieces


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
