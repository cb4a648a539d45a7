"""dsq-cost estimate: precisions, or the levels of a run, in one line each."""

import argparse
from collections.abc import Sequence

from costmodel.cli.answer import (
    Answer,
    Record,
    Section,
    facts,
    floor_record,
    hardware_facts,
    heading,
    refuse_idle,
    setups_of,
)
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.methods import Setup
from costmodel.model.operations import Workload
from costmodel.model.roofline import evaluate
from costmodel.paper.calibrated import level_costs, shares
from costmodel.workloads.named import asked
from dsq.precision import parse_rise_at

#: options that change nothing in the paper profile, which costs linear layers and knows no hardware
IGNORED_BY_PAPER = (
    *("hardware", "exclude", "freeze", "lora", "lora_layers", "fused_attention"),
    *("eager_attention", "chunked_loss", "box_axis", "container"),
)


def run(arguments: argparse.Namespace) -> Answer:
    """A record for each setup, and their mean by the shares of the work that a run does at each."""
    setups = setups_of(arguments, arguments.precision)
    worked = _shares(arguments.rise_at, len(setups))
    workload = asked(**vars(arguments)).build()
    units = setups_of(arguments, [arguments.relative_to])
    if len(units) > 1:
        raise ValueError(f"relative_to must be one precision, as [16,4,4,16], got {arguments.relative_to!r}")
    shown: dict[str, str] = {"share": ".1%"} if worked else {}
    if arguments.profile == "paper":
        refuse_idle(arguments, IGNORED_BY_PAPER, "in the paper profile")
        records, known, notes = _by_paper(workload, setups, units[0]), facts(workload), []
        title = f"{workload.name}, paper profile, relative to {units[0]}"
        shown |= {"arithmetic": ".4f", "dram": ".4f"}
    else:
        hardware = load_hardware(arguments.hardware)
        records = _from_first_principles(workload, setups, units[0], hardware)
        title, known = heading(workload, hardware), facts(workload) | hardware_facts(hardware)
        shown |= {"dram_MB": ",.0f", "dram": ".3f", "linears_stash_MB": ",.1f", "model_saved_MB": ",.0f"}
        shown |= {"arithmetic": ".3f", "flop_per_byte": ",.0f", "bound": "", "floor_ms": ",.1f"}
        meant = (
            f"a training step; dram and arithmetic: relative to {units[0]}; linears stash: what the converted layers "
            "keep for the backward; model saved: what the whole model keeps."
        )
        notes = [meant, f"times: {hardware.rates}."]
    if worked:
        records.append(_mean_record(records, worked))
    return Answer([Section("estimates", title, records, {"setup": "", **shown})], notes, known)


def _shares(rise_at: str | None, levels: int) -> list[float]:
    """Each level's share of a run, as --rise-at says; none without it. Raises ValueError where it does not fit."""
    if not rise_at:
        return []
    try:
        moments = [float(word) for word in rise_at.split()]
    except ValueError:
        moments = []
    if not moments or not all(0 < moment < 1 for moment in moments):
        raise ValueError(f"rise_at must be fractions of the run between 0 and 1, as in 0.8, got {rise_at!r}")
    return shares(parse_rise_at(moments, levels))


def _by_paper(workload: Workload, setups: list[Setup], unit: Setup) -> list[Record]:
    whole, *costs = level_costs(workload, [unit, *setups])
    return [
        _named(setup) | {"arithmetic": cost.arithmetic / whole.arithmetic, "dram": cost.dram / whole.dram}
        for setup, cost in zip(setups, costs, strict=True)
    ]


def _from_first_principles(workload: Workload, setups: list[Setup], unit: Setup, hardware: Hardware) -> list[Record]:
    whole, *costs = (evaluate(workload, setup, hardware) for setup in (unit, *setups))
    return [
        _named(setup)
        | {
            "dram_MB": cost.dram_bytes / 1e6,
            "dram": cost.dram_bytes / whole.dram_bytes,
            "linears_stash_MB": cost.stash_bytes / 1e6,
            "model_saved_MB": cost.saved_bytes / 1e6,
            "arithmetic": cost.arithmetic / whole.arithmetic,
            **floor_record(cost.total),
        }
        for setup, cost in zip(setups, costs, strict=True)
    ]


def _named(setup: Setup) -> Record:
    return {"setup": str(setup), "format": setup.format.name, "precision": str(setup.precision)}


#: columns that are rates or names, of which a run has no mean
_NO_COSTS = ("setup", "format", "precision", "share", "flop_per_byte", "ridge", "bound")


def _mean_record(records: list[Record], worked: Sequence[float]) -> Record:
    """The run's record; each level's is given its share."""
    for record, share in zip(records, worked, strict=True):
        record["share"] = share
    mean: Record = {"setup": f"{records[0]['format']} mean", "format": records[0]["format"], "precision": "mean"}
    mean["share"] = 1.0
    costs = [name for name in records[0] if name not in _NO_COSTS]
    return mean | {name: sum(record[name] * record["share"] for record in records) for name in costs}
