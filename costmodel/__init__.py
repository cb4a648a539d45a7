"""Costs of a training: memory, time, DRAM bytes, multiplier work, roofline bound. Imports no torch.

workloads/   shapes of a training step: named models, a Hugging Face config.json, a traced model's file
model/       operations, methods -> ledger -> traffic, entries -> memory, roofline, from first principles
planning/    does it fit, how long is a step, over how many devices, what would help
hardware/    peaks and bandwidths, each with its source
paper/       the calibrated model that reproduces the published tables, and the tables themselves
cli/         dsq-cost: main.py parses, commands/ answer, pictures/ draw
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import mul
from typing import TYPE_CHECKING, Any

from dsq.costmodel.names import refuse

if TYPE_CHECKING:
    from dsq.costmodel.planning.plan import Plan


def plan(workload: str, hardware: str = "a100-80gb", **options: Any) -> "Plan":
    """Answer whether a training fits, how fast it is, what bounds it and what would help: `dsq-cost plan`.

    Args:
        workload: a model's name, a config.json or a workload file.
        hardware: a device's name or a .toml file.
        options: those of `dsq-cost plan`: sequences, tokens, lora, freeze, chunked_loss, eager_attention (fields of
            `dsq.costmodel.workloads.named.AskedStep`), devices, zero, tensor, pipeline, accumulate, optimizer (those
            of `dsq.costmodel.planning.plan.Question`); fit, bytes of a device's memory; gpus, all devices; qlora, the
            rank of adapters over weights of 4 bits.
    Returns:
        the plan: `answer` in words, `best`, `rows`, and `as_dict()`, which is what `--json` prints.
    Raises:
        ValueError: what is asked cannot be planned. TypeError: an option that there is not.
    """
    from dsq.costmodel.planning.plan import Question

    return Question.of(workload, hardware, **options).ask()


def compare_devices(workload: str, **options: Any) -> "list[Plan]":
    """Return the plan for each device that has a profile, first of those that fit the training, the fastest first:
    `dsq-cost plan --hardware all`. Largest batches are left out.

    Args:
        workload: a model's name or a config.json.
        options: those of `plan`.
    Raises:
        ValueError: what is asked cannot be planned on any device.
    """
    from dsq.costmodel.hardware.hardware import DEFAULT_HARDWARE, load_hardware, profile_names
    from dsq.costmodel.planning.plan import Question

    question, plans, faults = Question.of(workload, DEFAULT_HARDWARE, **options), [], []
    for hardware in map(load_hardware, profile_names()):
        try:
            step = replace(question.step, cpu=hardware.cpu)
            plans.append(replace(question, step=step, hardware=hardware).ask(batches=False))
        except ValueError as error:
            faults.append(error)
    if not plans:
        raise faults[0]
    return sorted(plans, key=lambda plan: (not plan.best.fits, -plan.best.tokens_per_second))


def predicted(config: Mapping[str, Any], workload: dict[str, Any], total_updates: int = 0) -> str:
    """Return the cost of a run before it starts, at each level and in all, in a line: arithmetic and DRAM by the
    paper's model, fixed-point 32 = 1.

    In all: from the first level's to the last's where plateaus decide, or its length is not known.

    Args:
        config: ``dsq.DSQConfig.as_dict()``.
        workload: a training step, as ``dsq.workload.trace(model, batch)`` gives it.
        total_updates: of the run, which rises in updates are shares of; 0: nothing bounds it.
    Raises:
        ValueError: a config or a workload that cannot be read.
    """
    from dsq.costmodel.model.methods import Setup, template
    from dsq.costmodel.paper.calibrated import arithmetic, dram, rising_shares
    from dsq.costmodel.workloads import workload_file
    from dsq.precision import parse_levels

    is_config = isinstance(config, Mapping) and {"levels", "format", "rise_at"}.issubset(config)
    refuse(
        (not is_config, f"config must be a DSQConfig's as_dict(), got {config!r}"),
        (
            not workload_file.is_workload(workload),
            f"workload must be what dsq.workload.trace gives, got {type(workload)}",
        ),
    )
    worked = rising_shares(config["rise_at"], total_updates)
    levels, fmt = parse_levels(config["levels"]), template(config["format"], config)
    setups, step = [Setup(fmt, level) for level in levels], workload_file.parse(workload, "of the run")
    lines = []
    for name, costs in (("arithmetic", [*map(arithmetic, setups)]), ("DRAM", [dram(step, setup) for setup in setups])):
        of_run = [sum(map(mul, costs, worked))] if worked else [costs[0], costs[-1]]
        parts = [
            *(f"{cost:.4f} at {level}" for cost, level in zip(costs, levels, strict=True)),
            *[f"{' to '.join(f'{cost:.4f}' for cost in of_run)} in all"] * (len(levels) > 1),
        ]
        lines.append(f"{name} {', '.join(parts)}")
    return "; ".join(lines)
