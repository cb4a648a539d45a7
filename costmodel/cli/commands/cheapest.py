"""dsq-cost cheapest: of the setups whose accuracy was measured, those that reach one, the cheapest first."""

import argparse

from costmodel.cli.measured_runs import MeasuredSetup, load_runs
from costmodel.cli.output import Answer, Record, Section
from costmodel.cli.query import facts, hardware_of, heading, setup_of, times_note, workload_of
from costmodel.hardware.hardware import Hardware
from costmodel.model.estimate import Estimate, evaluate
from costmodel.model.operations import Workload
from dsq.arguments import number

#: what --by takes -> the column of the records
COLUMNS = {"time": "ms", "dram": "dram_MB", "arithmetic": "arithmetic", "stash": "stash_MB"}


def run(arguments: argparse.Namespace) -> Answer:
    workload, hardware = workload_of(arguments), hardware_of(arguments)
    setups, measure = load_runs(arguments.ledger, arguments.recipe, vars(arguments))
    unit = setup_of(arguments, arguments.relative_to)
    reference = evaluate(workload, unit, hardware)
    best = max(setup.score for setup in setups)
    for name in ("accuracy", "within"):
        number(name, getattr(arguments, name) or 0.0)
    wanted = best - arguments.within if arguments.accuracy is None else arguments.accuracy
    records = [_record(setup, workload, hardware, reference, wanted) for setup in setups]
    records.sort(key=lambda record: (record["reaches"] != "yes", record[COLUMNS[arguments.by]]))
    shown = {"setup": "", "score": ".2f", "seeds": "", "reaches": "", "ms": ",.1f", "dram_MB": ",.0f", "dram": ".3f"}
    shown |= {"arithmetic": ".3f", "stash_MB": ",.1f"}
    reaching = [record for record in records if record["reaches"] == "yes"]
    notes = [
        f"of the setups measured, cheapest by {arguments.by} with {measure} of at least {wanted:.2f}: "
        f"{reaching[0]['setup']}."
        if reaching
        else f"none of the setups measured reaches {measure} {wanted:.2f}; the best is {best:.2f}.",
        f"score: mean {measure} of the ledger's seeds, on its own models and data; costs: of {workload.name}, whose "
        f"accuracy was not measured; dram, arithmetic: relative to {unit}. A share is of the run's tokens, or "
        "updates where none were counted.",
        times_note(hardware),
    ]
    title = f"{arguments.ledger}; {heading(workload, hardware)}"
    return Answer([Section("setups", title, records, shown)], notes, facts(workload, hardware) | {"wanted": wanted})


def _record(
    measured: MeasuredSetup, workload: Workload, hardware: Hardware, reference: Estimate, wanted: float
) -> Record:
    history = measured.history
    costed = workload.excluding(history.exclude) if history.exclude else workload
    costs = [evaluate(costed, work.setup, hardware) for work in history.levels]

    def mean(values: list[float]) -> float:
        return sum(share * value for share, value in zip(history.shares, values, strict=True))

    dram = mean([float(cost.dram_bytes) for cost in costs])
    record: Record = {"setup": measured.name, "score": measured.score, "seeds": len(measured.scores)}
    record |= {"reaches": "yes" if measured.score >= wanted else "no"}
    record |= {"ms": 1e3 * mean([float(cost.total.seconds) for cost in costs]), "dram_MB": dram / 1e6}
    record |= {"dram": dram / float(reference.dram_bytes)}
    record |= {"arithmetic": mean([float(cost.arithmetic / reference.arithmetic) for cost in costs])}
    return record | {"stash_MB": mean([float(cost.stash_bytes) / 1e6 for cost in costs])}
