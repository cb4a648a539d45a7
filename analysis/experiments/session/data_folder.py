"""An experiment's data: found or generated, cut into subwords and binarised once, shared between its runs."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.corpus.generate import write
from analysis.experiments import finetune, glue, translate
from analysis.experiments.plan.experiment import Data
from analysis.experiments.prepare import check_sha256
from analysis.experiments.text import sameness
from analysis.experiments.training.results import write_json
from analysis.experiments.training.translation import Translation
from dsq.command.files import make_folder, turn_at

#: fields of Data that say where the text lies, not what it is
_WHEREABOUTS = ("path", "get")


def settings(data: Data) -> dict[str, Any]:
    """The settings of the data that a run's numbers depend on."""
    return {key: value for key, value in asdict(data).items() if key not in _WHEREABOUTS}


def same(recorded: dict[str, Any], data: Data) -> bool:
    """Whether ``recorded`` are the data's settings; one that the record is too old to have counts as its default."""
    return {**settings(Data(kind=data.kind)), **recorded} == settings(data)


def check_present(data: Data) -> None:
    """Raise ValueError, with where to get them, where the data are absent, or other than those that were published."""
    if data.kind != "generated" and not Path(data.path).is_dir():
        raise ValueError(f"data.path {data.path}: there is no such folder; give --data DIR. {data.get}".strip())
    needed = finetune.PRETRAINED if data.kind == "finetuning" else glue.PRETRAINED
    for name in needed if data.pretrained else ():
        path = Path(data.pretrained) / name
        if not path.is_file():
            raise ValueError(f"data.pretrained {data.pretrained}: there is no {name}. {data.get}".strip())
        if name in glue.SHA256:
            check_sha256(path, glue.SHA256[name], "GPT-2's")


def prepare(data: Data, folder: Path) -> None:
    """Fill ``folder`` for the runs, where that is still to be done; processes take turns. Raises ValueError."""
    make_folder(folder)
    with turn_at(folder):
        _prepare(data, folder)


def _prepare(data: Data, folder: Path) -> None:
    record = folder / "data.json"
    if record.exists() and not same(json.loads(record.read_text(encoding="utf-8")), data):
        raise ValueError(f"{folder}: was prepared with other settings than the recipe's data: give another --out")
    if not record.exists():  # what a killed preparation left may be of other settings
        shutil.rmtree(folder / "binary", ignore_errors=True)
        (folder / sameness.FILE).unlink(missing_ok=True)
    if data.kind == "generated" and not record.exists():
        write(folder / "text", data.sentences, data.held_out, data.corpus_seed)
    if data.translates:
        translate.prepare(translation(data, folder))
    else:
        tables = glue.read_tables(Path(data.path), data.task)
        if data.kind == "labelled" and not glue.is_prepared(folder):
            pretrained = Path(data.pretrained) if data.pretrained else None
            glue.prepare(tables, data.vocab, folder, pretrained)
        sameness.check_same(tables, folder)
    write_json(settings(data), record)


def translation(data: Data, folder: Path) -> Translation:
    same = {name: getattr(data, name) for name in ("source", "target", "prefix", "lowercase", "vocab")}
    return Translation(data=_text(data, folder), out=folder, columns=tuple(data.columns.split(",")), **same)


def arguments(data: Data, folder: Path) -> list[str]:
    """The command of one run, up to its training flags: python -m ... with the data, as prepared in ``folder``."""
    shared = ["--data", str(_text(data, folder).resolve()), "--resume"]
    shared += ["--pretrained", str(Path(data.pretrained).resolve())] if data.pretrained else []
    if data.kind == "finetuning":
        return ["analysis.experiments.finetune", "--task", data.task, *shared]
    shared += ["--prepared", str(folder.resolve()), "--vocab", str(data.vocab)]
    if data.kind == "labelled":
        return ["analysis.experiments.glue", "--task", data.task, *shared]
    shared += ["--source", data.source, "--target", data.target, "--columns", data.columns, "--beam", str(data.beam)]
    shared += ["--prefix", data.prefix] if data.prefix else []
    return ["analysis.experiments.translate", *shared, *(["--lowercase"] if data.lowercase else [])]


def _text(data: Data, folder: Path) -> Path:
    return folder / "text" if data.kind == "generated" else Path(data.path)
