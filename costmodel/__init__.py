"""Costs of a training: memory, time, DRAM bytes, multiplier work, roofline bound. Imports no torch.

workloads/   shapes of a training step: named models, a Hugging Face config.json, a traced model's file
model/       operations, methods -> ledger -> traffic, entries -> memory, roofline, from first principles
planning/    does it fit, how long is a step, over how many devices, what would help
hardware/    peaks and bandwidths, each with its source
paper/       the calibrated model that reproduces the published tables, and the tables themselves
cli/         dsq-cost: main.py parses, commands/ answer, pictures/ draw
"""

from collections.abc import Mapping
from operator import mul
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsq.costmodel.planning.plan import Plan, Question

MAX_DEVICES = 2**20


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
    return _question(workload, hardware, **options).ask()


def compare_devices(workload: str, **options: Any) -> "list[Plan]":
    """Return the plan for each device that has a profile, first of those that fit the training, the fastest first:
    `dsq-cost plan --hardware all`. Largest batches are left out.

    Args:
        workload: a model's name or a config.json.
        options: those of `plan`.
    Raises:
        ValueError: what is asked cannot be planned on any device.
    """
    from dsq.costmodel.hardware.hardware import profile_names
    from dsq.costmodel.planning.plan import Plan

    plans, faults = [], []
    for hardware in profile_names():
        try:
            question = _question(workload, hardware, **options)
            plans.append(Plan(question, tuple(question.rows())))
        except ValueError as error:
            faults.append(error)
    if not plans:
        raise faults[0]
    return sorted(plans, key=lambda plan: (not plan.best.fits, -plan.best.tokens_per_second))


def _question(
    workload: str,
    hardware: str,
    *,
    fit: float = 0,
    qlora: int | None = None,
    gpus: int | None = None,
    base_bits: int = 0,
    **options: Any,
) -> "Question":
    from dsq.costmodel.hardware.hardware import load_hardware
    from dsq.costmodel.names import refuse
    from dsq.costmodel.planning.plan import BASE_BITS, Question
    from dsq.costmodel.workloads.named import AskedStep

    lora, inside = options.get("lora"), options.get("tensor", 1) * options.get("pipeline", 1)
    refuse(
        (
            lora is not None and qlora is not None,
            "give --lora or --qlora, not both: --qlora has a rank of its own",
        ),
        (
            base_bits and lora is None and qlora is None,
            "--base-bits does nothing without --lora: leave it out",
        ),
        (
            gpus is not None and (not 1 <= gpus <= MAX_DEVICES or gpus % inside),
            f"--gpus {gpus} must be a positive multiple of --tensor times --pipeline ({inside})",
        ),
    )
    options |= {"optimizer": str(options.get("optimizer", "adam")).lower().replace("adamw", "adam")}
    options |= ({} if qlora is None else {"lora": qlora}) | ({} if gpus is None else {"devices": gpus // inside})
    base_bits = base_bits or (4 if qlora is not None else 0)
    device = load_hardware(hardware)
    AskedStep.build.cache_clear()  # a config.json may have changed since the last question
    AskedStep.parts.cache_clear()
    of_step = {name: options.pop(name) for name in vars(AskedStep()) if name in options}
    step = AskedStep(workload, cpu=device.cpu, **of_step)
    return Question(step, device, budget=fit, base_bits=BASE_BITS[base_bits], **options)


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
    from dsq.costmodel.paper.calibrated import level_costs, rising_shares
    from dsq.costmodel.workloads import workload_file
    from dsq.precision import parse_levels

    if not isinstance(config, Mapping) or not {"levels", "format", "rise_at"}.issubset(config):
        raise ValueError(f"config must be a DSQConfig's as_dict(), got {config!r}")
    if not workload_file.is_workload(workload):
        raise ValueError(f"workload must be what dsq.workload.trace gives, got {type(workload)}")
    worked = rising_shares(config["rise_at"], total_updates)
    levels, fmt = parse_levels(config["levels"]), template(config["format"], config)
    setups = [Setup(fmt, level) for level in levels]
    costs = level_costs(workload_file.parse(workload, "of the run"), setups)
    lines = []
    for name, field in (("arithmetic", "arithmetic"), ("DRAM", "dram")):
        per_level = [cost[field] for cost in costs]
        of_run = [sum(map(mul, per_level, worked))] if worked else [per_level[0], per_level[-1]]
        parts = [f"{cost:.4f} at {level}" for cost, level in zip(per_level, levels, strict=True)]
        parts += [f"{' to '.join(f'{cost:.4f}' for cost in of_run)} in all"] * (len(levels) > 1)
        lines.append(f"{name} {', '.join(parts)}")
    return "; ".join(lines)
