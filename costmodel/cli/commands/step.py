"""dsq-cost plan, estimate, roofline: a training step by methods, by precisions, by classes of operations."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dsq import costmodel, recipes
from dsq.arguments import whole_number
from dsq.command import read_toml, write_whole
from dsq.costmodel.cli.answer import Answer, Record, Section, hardware_facts, refuse_idle
from dsq.costmodel.hardware.hardware import GIGA, MAX_WORD, Hardware, Rate, load_hardware
from dsq.costmodel.model.memory import peak_memory
from dsq.costmodel.model.methods import Method, Setup, is_precision, parse_setups, used_options, whole_stash
from dsq.costmodel.model.operations import Workload
from dsq.costmodel.model.roofline import ZERO, Floor, evaluate, floors, rates, traffic_of, widened_seconds
from dsq.costmodel.model.traffic import arithmetic_cost, matmuls
from dsq.costmodel.names import refuse
from dsq.costmodel.paper.calibrated import FIXED_32, arithmetic, dram, moved_bits, rising_shares
from dsq.costmodel.planning.plan import ASKED
from dsq.costmodel.workloads.named import AskedStep, asked
from dsq.formats import NAMED
from dsq.precision import parse_rise_at

_TEXTS: dict[str, dict[str, str]] = read_toml(Path(__file__).parents[1] / "explanations.toml")
#: options of dsq.costmodel.plan
_QUESTION = (*vars(AskedStep()), *ASKED, *("hardware", "qlora", "gpus", "base_bits", "fit", "train_tokens", "price"))


def plan(arguments: argparse.Namespace) -> Answer:
    methods = tuple(_asked_methods(arguments))
    if methods:
        refuse_idle(arguments, ("all",), "with precisions, which are all shown")
    options = {name: value for name, value in vars(arguments).items() if name in _QUESTION and value is not None}
    if arguments.hardware == "all":
        return _devices(arguments, options | {"methods": methods})
    answer = costmodel.plan(**options, methods=methods)
    if arguments.picture or arguments.html:
        from dsq.costmodel.cli.pictures.plan import draw_page, draw_picture

        for path, draw in ((arguments.picture, draw_picture), (arguments.html, draw_page)):
            if path:
                write_whole(path, partial(draw, plan=answer))
    data = answer.as_dict()
    records, notes = data.pop("methods"), data.pop("notes")
    modes = {row.method.name: row.method.mode for row in (answer.rows if arguments.all else answer.shown)}
    shown = [record for record in records if record["method"] in modes]
    section = Section("methods", heading(answer.workload, answer.question.hardware), records, "methods", shown)
    return Answer([section], notes, data, lead=answer.answer, legend=_explained(modes))


def _devices(arguments: argparse.Namespace, options: dict[str, Any]) -> Answer:
    """Return a record for each device that fits, with its best method, or of which several would fit."""
    one_device = "goes with one device: give --hardware the name of one, not all"
    refuse(*((getattr(arguments, name), f"--{name} {one_device}") for name in ("picture", "html", "fit")))
    plans = costmodel.compare_devices(**{name: value for name, value in options.items() if name != "hardware"})
    figures = {"hours": arguments.train_tokens, "cost": arguments.price}
    records: list[Record] = [
        {"device": answer.question.hardware.name, "least": answer.least_devices}
        | (
            answer.best.record() | {name: getattr(answer, name) for name in figures if figures[name]}
            if answer.best.fits
            else {}
        )
        for answer in plans
        if answer.least_devices
    ]
    refuse((not records, "no device that has a profile fits it: ask of one, for what would help"))
    workload, question, tokens = plans[0].workload, plans[0].question, plans[0].best.tokens
    fitting = sum(answer.best.fits for answer in plans)
    title = f"{workload.name}: {fitting} of {len(plans)} devices fit a step of {tokens:,} tokens"
    title += f", {question.all_devices:,} of each, ZeRO {question.zero}" * (question.all_devices > 1)
    notes = [
        *[f"cost: at {question.price:g} an hour and device."] * bool(question.price),
        "least: the fewest that fit, each with its batch. tight: as allocated, not as reserved.",
        "times: docs/cost-model.md has ranges.",
    ]
    legend = _explained({record["method"]: record["mode"] for record in records if "method" in record})
    return Answer([Section("devices", title, records, "devices")], notes, facts(workload), legend=legend)


def _explained(modes: Mapping[str, str]) -> str:
    """Return the meaning of each part of the methods' names, and which of them simulate or save; modes: of each
    method."""
    text = " / ".join([*modes, ""])
    parts = [f"{part.strip('[]/ ')}: {meaning}" for part, meaning in _TEXTS["parts"].items() if part in text]
    return "; ".join([*parts, *_uses(modes)]) + "."


def _uses(modes: Mapping[str, str]) -> list[str]:
    """Return which rows simulate, and which save; modes: row -> its mode."""
    return [
        f"{use} ({meaning}): {' / '.join(row for row, mode in modes.items() if mode == use)}"
        for use, meaning in _TEXTS["modes"].items()
        if use in modes.values()
    ]


def _asked_methods(arguments: argparse.Namespace) -> Iterator[Method]:
    """Yield a method of each precision; behind one, " all" stands for dsq.DSQConfig(stash="all")."""
    texts = _precisions(arguments)
    setups = _setups(arguments, [text.removesuffix(" all") for text in texts])
    for text in texts:
        for setup in setups[text.removesuffix(" all")]:
            stash = whole_stash(setup) if text.endswith(" all") else None
            yield Method(f"{setup}{' all' if stash else ''}", setup, stash=stash)


def _precisions(arguments: argparse.Namespace) -> list[str]:
    """Return the words that are precisions; another one is the workload's name. Raises ValueError."""
    has_workload = arguments.workload != arguments.parser.get_default("workload")
    # of plan, which may be a model's folder too: deepseek-v3
    lone_recipe = arguments.command == "plan" and not has_workload and {*arguments.words} <= {*recipes.names()}
    recipe = " ".join(arguments.words) if lone_recipe else ""
    refuse((recipe and not Path(recipe).exists(), f"{recipe} is a recipe, not a model: give both, as in gpt2 {recipe}"))
    precisions = [word for word in arguments.words if not recipe and is_precision(word.removesuffix(" all"))]
    names = [word for word in arguments.words if word not in precisions]
    for word in names:
        near = [name for name in NAMED if name.startswith(word)] or get_close_matches(word, NAMED, cutoff=0.8)
        refuse((near, f"{word!r} is neither a model nor a precision; nearest are {', '.join(near)}"))
    names += [arguments.workload] * (has_workload or not names)
    refuse(
        (
            len(names) > 1,
            f"workload is given twice: {' and '.join(map(repr, names))}; a precision is written as in [8,4,8,8], a "
            "format of your own as its text, as in grid:2,0,7.0,1x32,e8m0,even,0,1.0",
        )
    )
    arguments.workload = names[0]
    return precisions


def _setups(arguments: argparse.Namespace, precisions: Sequence[str], *other_texts: str) -> dict[str, list[Setup]]:
    """Return the setups of each precision, in its own format, or in that of the options. Raises ValueError for an
    option of formats that no text uses, and a container too narrow for a precision.

    Args:
        other_texts: precisions that options of formats may be for too.
    """
    options = vars(arguments)
    setups = {text: parse_setups(text, options) for text in (*precisions, *other_texts)}
    idle = {"format", "min_weight_bits", "block_size"}.difference(*(used_options(text, options) for text in setups))
    if not precisions:
        idle |= {"container"}
    elif not any(setup.mode for setup in chain(*setups.values())):  # which convert no layer
        idle |= {"exclude", "tied"}
    refuse_idle(arguments, sorted(idle), f"for {', '.join(precisions)}" if precisions else "without a precision")
    for setup in chain(*(setups[text] for text in precisions)):
        narrow = arguments.container and arguments.container < setup.container_bits
        refuse((narrow, f"container must be {setup.container_bits} for {setup}, got {arguments.container}"))
    return setups


def _costed_setups(arguments: argparse.Namespace, *other_texts: str) -> list[Setup]:
    """Return the setups of the words that are precisions; of none: bf16. Raises ValueError."""
    precisions = _precisions(arguments) or ["bf16"]
    setups = _setups(arguments, precisions, *other_texts)
    return [setup for text in precisions for setup in setups[text]]


def _limits(workload: Workload, setups: list[Setup], hardware: Hardware, buffer: float) -> Iterator[str]:
    """Yield what a buffer changes, and which setups need more memory than the hardware has."""
    peaks = {str(setup): peak_memory(workload, Method("", setup)).peak for setup in setups}
    too_large = [f"{name} {peak / GIGA:,.1f} GB" for name, peak in peaks.items() if peak > hardware.memory_bytes > 0]
    if too_large:
        yield (
            f"memory: the step needs more than the {hardware.memory_bytes / GIGA:,.1f} GB of one {hardware.name}: "
            f"{', '.join(too_large)}. dsq-cost plan names what fits."
        )
    if buffer:
        moved = chain(*(traffic_of(workload, setup, hardware, buffer) for setup in setups))
        again = any(transfer.bytes for transfer in moved if transfer.kind == "again")
        least = "what tiles fetch again through it counts" if again else "it holds all tiles: nothing is fetched again"
        yield f"buffer of {buffer / 1e6:,.4g} MB: {least}."


def facts(workload: Workload) -> Record:
    return {
        "workload": workload.name,
        "tokens": workload.tokens,
        "parameters": workload.parameters,
        "macs": workload.macs,
        "source": workload.source,
    }


def named(setup: Setup) -> Record:
    return {"setup": str(setup), "format": setup.family, "precision": str(setup.precision), "mode": setup.mode}


def heading(workload: Workload, hardware: Hardware) -> str:
    return (
        f"{workload.name}: {workload.parameters:,} parameters, {workload.tokens:,} tokens a step, "
        f"{workload.macs / 1e9:,.1f} GMAC a step; on {hardware.name}"
    )


def floor_record(floor: Floor) -> Record:
    return {
        "gflop": floor.flops / 1e9,
        "flop_per_byte": floor.intensity,
        "ridge": floor.ridge if floor.compute_seconds else None,
        "bound": "memory" if floor.memory_bound else "compute",
        "expected_ms": floor.seconds * 1e3,
    }


# ---- estimate: precisions, or the levels of a run, in one line each


def estimate(arguments: argparse.Namespace) -> Answer:
    """Return a record for each setup, and their mean by the shares of the work that a run does at each."""
    relative_to = arguments.relative_to
    setups = _costed_setups(arguments, *[relative_to] * (relative_to != arguments.parser.get_default("relative_to")))
    worked = _shares(arguments.rise_at, len(setups)) if arguments.rise_at else []
    word = whole_number("word", arguments.word, 1, MAX_WORD)
    hardware = load_hardware(arguments.hardware)
    workload = asked(**vars(arguments), cpu=hardware.cpu).build()
    unit, *other_units = parse_setups(relative_to, vars(arguments))
    refuse((other_units, f"relative_to must be one precision, as [16,4,4,16], got {relative_to!r}"))
    buffer = arguments.buffer or hardware.sram
    records, by_bits = _estimates(workload, setups, unit, hardware, buffer, word)
    stored = _TEXTS["stored"]["own_bits" if hardware.word else "containers"]
    notes = [
        *_limits(workload, setups, hardware, buffer),
        *(f"{use}." for use in _uses({str(setup): setup.mode for setup in setups})),
        _TEXTS["notes"]["estimate"].format(unit, word, stored),
        _times(hardware),
        _TEXTS["notes"]["joules" if any("joules" in record for record in records) else "no_joules"],
        *_widened(setups, workload, hardware),
    ]
    if worked:
        records, by_bits = (_with_mean(levels, worked) for levels in (records, by_bits))
    sections = [
        Section("estimates", heading(workload, hardware), records, "estimates"),
        Section("by_bits", _TEXTS["titles"]["by_bits"], by_bits, "traffic"),
        Section("estimates", _TEXTS["titles"]["of_step"].format(stored), records, "traffic"),
    ]
    costed = facts(workload) | hardware_facts(hardware) | {"buffer_bytes": buffer, "paper_word_bits": word}
    return Answer(sections, notes, costed)


def _shares(rise_at: str, levels: int) -> list[float]:
    """Return each level's share of a run, as --rise-at says. Raises ValueError where it does not fit."""
    fractions = re.fullmatch(r"\s*0?\.\d+([\s,]+0?\.\d+)*\s*", rise_at)
    refuse((not fractions, f"rise_at must be fractions of the run between 0 and 1, as in 0.8, got {rise_at!r}"))
    return rising_shares(parse_rise_at(rise_at, levels))


def _widened(setups: Iterable[Setup], workload: Workload, hardware: Hardware) -> list[str]:
    """Return a note for each setup whose unquantized products run in a unit wider than they are."""
    return [
        f"{setup}: unquantized products take {seconds * 1e3:,.1f} ms in a wider unit, as no [[peak]] that is faster "
        f"holds float = {setup.container_bits}."
        for setup in setups
        if (seconds := widened_seconds(matmuls(workload, setup), hardware))
    ]


def _estimates(
    workload: Workload, setups: list[Setup], unit: Setup, hardware: Hardware, buffer: float, word: int
) -> tuple[list[Record], list[Record]]:
    """Return two records for each setup: its costs, and its traffic by the paper's accounting."""
    whole_bits = sum(moved_bits(workload, unit, buffer, word).values())
    whole = sum(transfer.bytes for transfer in traffic_of(workload, unit, hardware, buffer))
    whole_arithmetic, whole_of_step = arithmetic(unit), arithmetic_cost(matmuls(workload, unit))
    records, by_bits = list[Record](), list[Record]()
    for setup in setups:
        cost, bits = evaluate(workload, setup, hardware, buffer), moved_bits(workload, setup, buffer, word)
        by_bits.append(named(setup) | _megabytes({kind: size / 8 for kind, size in bits.items()}))
        records.append(
            {
                **named(setup),
                "arithmetic": arithmetic(setup) / whole_arithmetic,
                "dram": sum(bits.values()) / whole_bits,
                "dram_of_step": cost.dram_bytes / whole,
                "dram_MB": cost.dram_bytes / 1e6,
                **_megabytes(cost.traffic | {"linears_stash": cost.stash_bytes, "model_saved": cost.saved_bytes}),
                "arithmetic_of_step": cost.arithmetic / whole_of_step,
                **floor_record(cost.total),
                **({} if cost.joules is None else {"joules": cost.joules}),
            }
        )
    return records, by_bits


def _megabytes(sizes: Mapping[str, float]) -> Record:
    return {f"{name.replace(' ', '_')}_MB": size / 1e6 for name, size in sizes.items()}


#: columns that are rates or names, of which a run has no mean
_NO_COSTS = ("setup", "format", "precision", "mode", "share", "flop_per_byte", "ridge", "bound")


def _with_mean(levels: list[Record], worked: Sequence[float]) -> list[Record]:
    """Return the records of a run's levels, each with its share, and of the run, which has those costs that each of
    them has."""
    costs = [name for name in levels[0] if name not in _NO_COSTS and all(name in level for level in levels)]
    fmt = levels[0]["format"]
    mean = {"setup": f"{fmt} mean".strip(), "format": fmt, "precision": "mean", "mode": "", "share": 1.0} | {
        name: sum(level[name] * share for level, share in zip(levels, worked, strict=True)) for name in costs
    }
    return [*(level | {"share": share} for level, share in zip(levels, worked, strict=True)), mean]


# ---- roofline: intensity, bound and time of each class of operations, and the picture


def roofline(arguments: argparse.Namespace) -> Answer:
    hardware, setups = load_hardware(arguments.hardware), _costed_setups(arguments)
    workload = asked(**vars(arguments), cpu=hardware.cpu).build()
    buffer = arguments.buffer or hardware.sram
    whole = sum(transfer.bytes for transfer in traffic_of(workload, FIXED_32, hardware, buffer))
    of_setups = [_classes(workload, setup, hardware, buffer, whole) for setup in setups]
    records = [record for classes, _ in of_setups for record in classes]
    if arguments.picture:
        from dsq.costmodel.cli.pictures.roofline import draw_roofline

        dots = [record for record in records if "tflops" in record]
        write_whole(arguments.picture, lambda path: draw_roofline(path, workload.name, hardware, dots))
    notes = [
        *_limits(workload, setups, hardware, buffer),
        *(note for _, note in of_setups),
        *(f"{use}." for use in _uses({str(setup): setup.mode for setup in setups})),
        *_widened(setups, workload, hardware),
        _TEXTS["notes"]["roofline"].format(
            _TEXTS["notes"]["overlaps" if hardware.efficiency.overlaps else "alternates"]
        ),
        _times(hardware),
    ]
    classes = Section("classes", heading(workload, hardware), records, "classes")
    return Answer([classes], notes, facts(workload) | hardware_facts(hardware) | {"buffer_bytes": buffer})


def _times(hardware: Hardware) -> str:
    """Return what the times are made of, in a note."""
    launched = _TEXTS["notes"]["launched"] if hardware.efficiency.launch else ""
    return f"times: {hardware.rates}.{launched}"


def _classes(
    workload: Workload, setup: Setup, hardware: Hardware, buffer: float, whole: float
) -> tuple[list[Record], str]:
    """Return a record for each class of operations, and one for all; and a note of what bounds the step, and of its
    traffic beside fixed-point 32's, which is ``whole``."""
    products = matmuls(workload, setup)
    classes = floors(traffic_of(workload, setup, hardware, buffer), products, hardware, setup.container_bits)
    total = sum(classes.values(), start=ZERO)
    class_rates = {name: rates(products, name, hardware) for name in (*classes, "total")}
    records = [
        {
            **named(setup),
            "class": name,
            **floor_record(floor),
            "runs_in": ", ".join(sorted(class_rates[name])),
            "dram_MB": floor.bytes / 1e6,
            "of_time": floor.seconds / total.seconds,
            **({"tflops": floor.flops_per_second / 1e12} if floor.flops else {}),
            **(_roof(floor, list(class_rates[name].values()), hardware) if name != "total" else {}),
        }
        for name, floor in {**classes, "total": total}.items()
    ]
    longest = max(classes, key=lambda name: classes[name].seconds)
    waits = "DRAM" if classes[longest].memory_bound else "arithmetic"
    share = classes[longest].seconds / total.seconds
    note = f"{setup}: {longest} bounds the step, {share:.0%} of its time, and waits for {waits}; in all"
    note += f" {total.waiting_seconds / total.seconds:.0%} of the time waits for DRAM."
    note += f" DRAM: {total.bytes / whole:.3f} of fixed-point 32, as drawn"
    if any(gemm.weight for gemm in workload.gemms):
        note += f"; linear layers by the paper's count {dram(workload, setup, buffer):.3f}"
    return records, f"{note}."


def _roof(floor: Floor, class_rates: list[Rate], hardware: Hardware) -> Record:
    """Return the fastest unit of a class, and the most that it reaches at the class's intensity."""
    peaks = {rate.peak.datatype: rate.peak.flops for rate in class_rates} or {"vector": hardware.vector_flops}
    unit = max(peaks, key=lambda name: peaks[name])
    slope = hardware.bandwidth * floor.intensity
    roof = min(slope, peaks[unit])
    return {
        "roof": "DRAM" if slope < peaks[unit] else unit,
        "roof_tflops": roof / 1e12,
        "of_roof": floor.flops_per_second / roof if roof else None,
    }
