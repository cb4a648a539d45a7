"""Tables 1, 6 and 7 of the paper (Yang, Lo, Mullins and Zhao, Dynamic Stashing Quantization, 2023) beside ours: a
record a row, with what is published (tables.toml), what is computed, and how far that is off.

Nothing that computes a cost reads this file; costs are relative to fixed-point 32, as the paper's are.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsq.command import read_toml
from dsq.costmodel.hardware.hardware import Hardware
from dsq.costmodel.model.methods import BF16, Setup, parse_setups
from dsq.costmodel.model.roofline import Floor, evaluate
from dsq.costmodel.model.traffic import mac_cost
from dsq.costmodel.paper import calibrated
from dsq.costmodel.workloads.named import load_workload
from dsq.formats import parse_format

Record = dict[str, Any]


def _rows(dataset: Record) -> Iterator[Record]:
    """Yield a dataset's rows: its table, name and workload, and each method's setup (empty: a DSQ run, averaged over
    its levels), arithmetic and dram; contradicts: why its dram cannot be right."""
    columns = (_DATA["methods"], dataset["arithmetic"], dataset["dram"])
    for (method, setup), arithmetic, dram in zip(*columns, strict=False):
        doubt = dataset.get("contradicts", {}).get(method, "")
        figures = {"arithmetic": arithmetic, "dram": dram, "contradicts": doubt}
        yield dataset | {"method": method, "setup": setup} | figures


def _setup(text: str) -> Setup:
    return parse_setups(text, {})[0]


_DATA = read_toml(Path(__file__).with_suffix(".toml"))
#: tables 1 and 6
ROWS = [row for dataset in _DATA["datasets"] for row in _rows(dataset)]


def static_rows(table: int) -> list[Record]:
    """Return the rows of table 1 or 6, DSQ's aside. fits: the constant of the model that the figure chose, "test" where
    it chose none, "excluded" where it contradicts the paper; residual: ours - published; off: the residual as a share
    of what is published."""
    return [_static(row) for row in ROWS if row["table"] == table and row["setup"]]


def _static(row: Record) -> Record:
    setup = _setup(row["setup"])
    record: Record = {
        "dataset": row["dataset"],
        "setup": str(setup),
        "method": row["method"],
        "precision": str(setup.precision),
        "contradicts": row["contradicts"],
    }
    published = (row["arithmetic"], row["dram"])
    for name, goal, predicted in zip(("arith", "dram"), published, _costs(row, setup), strict=True):
        residual = predicted - goal
        excluded = row["contradicts"] and name == "dram"
        figures = {
            "paper": goal,
            "ours": predicted,
            "off": residual / goal,
            "residual": residual,
            "fits": "excluded" if excluded else calibrated.FITTED[name].get(str(setup), "test"),
        }
        record |= {f"{name}_{kind}": figure for kind, figure in figures.items()}
    return record


def dsq_rows() -> list[Record]:
    """Return table 1's DSQ rows, each column as a run that did a share of its work at the second level, the rest at the
    first; IWSLT's against the headline's unrounded figures.

    share_alone: would match the one column (outside of 0..1: no run can); share_best: of both, by least squares.
    """
    return [record for row in ROWS if not row["setup"] for record in _dsq(row)]


def _dsq(row: Record) -> Iterator[Record]:
    published = (row["arithmetic"], row["dram"])
    if row["workload"] == "transformer_iwslt_de_en":
        arithmetic, dram = _costs(row, _setup("fixed:[16,16,16,16]"))
        published = (arithmetic / _DATA["headline"]["arithmetic"], dram / _DATA["headline"]["dram"])
    levels = (_costs(row, _setup(level)) for level in _DATA["dsq_levels"])
    columns = list(zip(("arithmetic", "dram"), published, *levels, strict=True))
    share = best_share([(goal, low, high) for _, goal, low, high in columns])
    for name, goal, low, high in columns:
        predicted = low + share * (high - low)
        yield {
            "dataset": row["dataset"],
            "column": name,
            "published": goal,
            "level_1": low,
            "level_2": high,
            "share_alone": (goal - low) / (high - low),
            "share_best": share,
            "ours": predicted,
            "residual": predicted - goal,
            "off": (predicted - goal) / goal,
        }


def best_share(columns: list[tuple[float, float, float]]) -> float:
    """Return the share in 0..1 at the second level that minimizes the squared residuals; columns: published, first,
    second."""
    best = sum((high - low) * (goal - low) for goal, low, high in columns)
    return min(1.0, max(0.0, best / sum((high - low) ** 2 for _, low, high in columns)))


def _costs(row: Record, setup: Setup) -> tuple[float, float]:
    """Return (arithmetic, DRAM) of the row's workload."""
    return float(calibrated.arithmetic(setup)), float(calibrated.dram(load_workload(row["workload"]), setup))


def table_7(hardware: Hardware) -> list[Record]:
    """Return the costs of OPT-1.3B trained in 16-bit floats: bounds and shares of time; with_adam: in a step
    with its update, a class of its own."""
    workload = load_workload("opt_1.3b", fused=False)
    step = replace(workload, operations=tuple(op for op in workload.operations if op.name != "optimizer"))
    without_update, with_update = (evaluate(costed, BF16, hardware).classes for costed in (step, workload))
    records = []
    for cls, floor in without_update.items():
        (published, bound), share = _DATA["table_7"][cls], _time_share(without_update, cls)
        records.append(
            {
                "class": cls,
                "flop_per_byte": float(floor.intensity),
                "ridge": float(floor.ridge),
                "bound_paper": bound,
                "bound_ours": "memory" if floor.memory_bound else "compute",
                "share_paper": published,
                "share_ours": share,
                "off": (share - published) / published,
                "with_adam": _time_share(with_update, cls),
                "residual": share - published,
            }
        )
    return records


def silicon_rows() -> list[Record]:
    """Return published costs of a multiply-accumulate in others' chips, beside mac_cost, which none of them chose."""
    records = []
    for row in _DATA["silicon"]:
        of_format, over = (mac_cost(fmt, fmt) for fmt in map(parse_format, (row["format"], row["over"])))
        predicted, published = of_format / over, row["published"]
        records.append(row | {"ours": predicted, "residual": predicted - published, "off": predicted / published - 1})
    return records


def _time_share(classes: dict[str, Floor], cls: str) -> float:
    return float(classes[cls].seconds / sum(floor.seconds for floor in classes.values()))
