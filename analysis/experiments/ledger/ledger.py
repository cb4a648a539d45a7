"""The ledger of an experiment: ledger.csv, a row a finished run. Columns that hold one number a level part them by a
space."""

import csv
import os
import platform
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from analysis import ROOT
from analysis.experiments.plan.costs import level_costs
from analysis.experiments.plan.experiment import Data, Experiment
from analysis.experiments.plan.runs import PlannedRun
from costmodel.paper.run_cost import weighed
from dsq.command.files import turn_at, write_text
from dsq.command.processor import processor
from dsq.command.table import as_csv

Row = dict[str, Any]
FILE = "ledger.csv"
#: of dsq.DSQConfig: what decides a run's numbers; a later option joins them by being in a recipe
_OPTIONS = (
    *("levels", "format", "box", "box_axis", "rounding", "exclude", "units", "patience", "threshold"),
    *("fraction_bits", "eval_full_precision"),
)
_FAIRSEQ, _HUGGING_FACE = ("fairseq", "sacrebleu", "sentencepiece"), ("transformers", "accelerate")


def place(run: PlannedRun, data: Data) -> dict[str, str]:
    """What a run on ``data`` is started on: commit, versions, CPU and, where it trains on one, GPU."""
    import torch

    on_cpu = data.kind == "finetuning" or run.training.get("cpu") or not torch.cuda.is_available()
    packages = ("torch", "numpy", *(_HUGGING_FACE if data.kind == "finetuning" else _FAIRSEQ))
    versions = [f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    return {
        "commit": _commit(),
        "versions": ", ".join(versions),
        "cpu": f"{processor()} x {os.cpu_count()}",
        "gpu": "" if on_cpu else torch.cuda.get_device_name(),
    }


def row(experiment: Experiment, run: PlannedRun, results: dict[str, Any], settings: dict[str, Any]) -> Row:
    """The ledger's row of a run that ended with ``results``."""
    history = results.get("history", {})
    levels = history.get("levels", [])
    work = [level["tokens"] or level["updates"] for level in levels]
    costs = level_costs(run, experiment.workload)
    cost = weighed(costs, work) if costs and levels else None
    losses = [loss for _, loss in results["valid_loss"]]
    own_model = results.get("costs", {}).get("first-principles", {})
    places = settings["places"]
    seconds = results.get("train_seconds", results["seconds"].get("train", results["seconds"].get("total")))
    return {
        "recipe": experiment.name,
        "run": run.name,
        "set": "; ".join(experiment.changes) or None,
        "label": run.label,
        "score": results.get("bleu", results.get("accuracy")),
        "measure": "BLEU" if "bleu" in results else "accuracy",
        "best_score": results.get("best_accuracy"),
        "paper_score": run.paper,
        "best_valid_loss": min(losses, default=None),
        "last_valid_loss": losses[-1] if losses else None,
        "arithmetic": cost.arithmetic if cost else None,
        "dram": cost.dram if cost else None,
        "arithmetic_own_model": own_model.get("arithmetic"),
        "dram_own_model": own_model.get("dram"),
        **{name: history.get(name) for name in _OPTIONS},
        "rise_at": None,
        **run.options,
        "seed": run.seed,
        "training": shlex.join(run.flags),
        "data": " ".join(f"{key}={value}" for key, value in settings["data"].items()),
        "text_sha256": results.get("text_sha256"),
        "level_updates": _joined(level["updates"] for level in levels),
        "level_tokens": _joined(level["tokens"] for level in levels),
        "stash_bytes": _joined(level.get("stash_bytes", "-") for level in levels),
        "stash_bytes_fp32": _joined(level.get("stash_bytes_fp32", "-") for level in levels),
        "seconds": seconds if len(places) == 1 else None,  # a resumed run knows those of its last session alone
        "sessions": len(places),
        **{key: " then ".join(dict.fromkeys(one[key] for one in places)) for key in places[0]},
        "signature": results.get("signature"),
    }


def read_ledger(path: Path) -> list[Row]:
    """Its rows, all texts. Raises ValueError where it is none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = list(csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if rows and not {"recipe", "run", "score"} <= set(rows[0]):
        raise ValueError(f"{path}: is no ledger of analysis.experiments.run: it has no columns recipe, run and score")
    return rows


def add_row(path: Path, new: Row) -> None:
    """Put a row into the ledger, in place of one of the same recipe and run; the file is replaced as a whole.

    Processes take turns: several may be at one ledger's runs.
    """
    with turn_at(path.parent):
        rows = {(one["recipe"], one["run"]): one for one in (read_ledger(path) if path.exists() else [])}
        rows[new["recipe"], new["run"]] = new
        write_text(path, as_csv(list(rows.values())))


def _joined(values: Any) -> str:
    return " ".join(map(str, values))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _commit() -> str:
    """The checkout's commit, "+" behind it where tracked files differ; "" where there is no checkout."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()
