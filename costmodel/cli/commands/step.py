"""dsq-cost plan, estimate, roofline: a training step by methods, by precisions, by classes of operations."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from dsq import costmodel, recipes
from dsq.arguments import whole_number
from dsq.command import read_toml, write_whole
from dsq.costmodel.cli.answer import Answer, Record, Section, hardware_facts, refuse_idle
from dsq.costmodel.hardware.hardware import Hardware, Rate, load_hardware
from dsq.costmodel.model.memory import peak_memory
from dsq.costmodel.model.methods import Method, Setup, is_precision, parse_setups, used_options, whole_stash
from dsq.costmodel.model.operations import Workload
from dsq.costmodel.model.roofline import ZERO, Floor, evaluate, floors, rates, widened_seconds
from dsq.costmodel.model.traffic import arithmetic_cost, matmuls, transfers
from dsq.costmodel.names import refuse
from dsq.costmodel.paper.calibrated import FIXED_32, arithmetic, dram, moved_bits, shares
from dsq.costmodel.planning.plan import ASKED, GIGA, RESERVED
from dsq.costmodel.workloads.named import AskedStep, asked
from dsq.formats import NAMED
from dsq.precision import parse_rise_at

_NAMES: dict[str, dict[str, str]] = read_toml(Path(__file__).parents[1] / "method_names.toml")
_BYTES = {"b": 1, "kb": 1e3, "kib": 2**10, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
MAX_WORD = 4096  #: bits
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(arguments: argparse.Namespace) -> Answer:
    methods = tuple(_asked_methods(arguments))
    if methods:
        refuse_idle(arguments, ("all",), "with precisions, which are all shown")
    names = (*vars(AskedStep()), *ASKED, "hardware", "qlora", "gpus", "base_bits")
    options = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    options |= {
        "methods": methods,
        "fit": parse_size("fit", arguments.fit, _BYTES, "80GB or 24GiB"),
        "train_tokens": parse_size("train_tokens", arguments.train_tokens, _COUNTS, "300M or 10B"),
        "price": parse_size("price", arguments.price, {"": 1}, "2.5"),
    }
    if arguments.hardware == "all":
        for option in ("picture", "html", "fit"):
            if getattr(arguments, option):
                raise ValueError(f"--{option} goes with one device: give --hardware the name of one, not all")
        return _devices(options)
    answer = costmodel.plan(**options)
    if arguments.picture or arguments.html:
        from dsq.costmodel.cli.pictures.plan import draw_page, draw_picture

        for path, draw in ((arguments.picture, draw_picture), (arguments.html, draw_page)):
            if path:
                write_whole(path, partial(draw, plan=answer))
    data = answer.as_dict()
    records, notes = data.pop("methods"), data.pop("notes")
    shown = {row.method.name for row in (answer.rows if arguments.all else answer.shown)}
    hidden = frozenset(record["method"] for record in records) - shown
    legend = _explained(record for record in records if record["method"] not in hidden)
    section = Section("methods", heading(answer.workload, answer.question.hardware), records, "methods", hidden)
    return Answer([section], notes, data, lead=answer.answer, legend=legend)


def _devices(options: dict[str, Any]) -> Answer:
    """Return a record for each device that fits, with its best method, or of which several would fit."""
    plans = costmodel.compare_devices(options.pop("workload"), **{k: v for k, v in options.items() if k != "hardware"})
    asked_for = {"hours": options["train_tokens"], "cost": options["price"]}
    fitting = sum(plan_.best.fits for plan_ in plans)
    records: list[Record] = []
    for plan_ in filter(lambda plan_: plan_.least_devices, plans):
        record: Record = {"device": plan_.question.hardware.name, "least": plan_.least_devices}
        if plan_.best.fits:
            record |= plan_.best.record() | {
                name: getattr(plan_, name) for name, is_asked in asked_for.items() if is_asked
            }
        records.append(record)
    refuse((not records, "no device that has a profile fits it: ask of one, for what would help"))
    workload, question, tokens = plans[0].workload, plans[0].question, plans[0].best.tokens
    count = question.devices * question.shard.devices
    title = f"{workload.name}: {fitting} of {len(plans)} devices fit a step of {tokens:,} tokens"
    title += f", {count:,} of each, ZeRO {question.zero}" * (count > 1)
    notes = [f"cost: at {question.price:g} an hour and device."] * bool(question.price)
    notes += [
        f"least: the fewest that fit, each with its batch. tight: not with {RESERVED - 1:.0%} more, reserved.",
        "times: docs/cost-model.md has ranges.",
    ]
    legend = _explained(record for record in records if "method" in record)
    return Answer([Section("devices", title, records, "devices")], notes, facts(workload), legend=legend)


def _explained(records: Iterable[Record]) -> str:
    """Return the meaning of each part of the methods' names, in a note, and which of them simulate or save."""
    modes = {record["method"]: record["mode"] for record in records}
    text = " / ".join([*modes, ""])
    parts = [f"{part.strip('[]/ ')}: {meaning}" for part, meaning in _NAMES["parts"].items() if part in text]
    return "; ".join([*parts, *_uses(modes)]) + "."


def _uses(modes: Mapping[str, str]) -> list[str]:
    """Return which rows simulate, and which save; modes: row -> its mode."""
    return [
        f"{use} ({meaning}): {' / '.join(row for row, mode in modes.items() if mode == use)}"
        for use, meaning in _NAMES["modes"].items()
        if use in modes.values()
    ]


def _asked_methods(arguments: argparse.Namespace) -> Iterator[Method]:
    """Yield a method of each precision; behind one, " all" stands for dsq.DSQConfig(stash="all")."""
    precisions = _precisions(arguments)
    _check_options(arguments, [text.removesuffix(" all") for text in precisions])
    for text in precisions:
        levels, behind = text.removesuffix(" all"), " all" * text.endswith(" all")
        for setup in parse_setups(levels, vars(arguments)):
            yield Method(f"{setup}{behind}", setup, stash=whole_stash(setup) if behind else None)


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
    if has_workload:
        names.append(arguments.workload)
    if len(names) > 1:
        workloads = " and ".join(map(repr, names))
        raise ValueError(
            f"workload is given twice: {workloads}; a precision is written as in [8,4,8,8], a format of your own as "
            "its text, as in grid:2,0,7.0,1x32,e8m0,even,0,1.0"
        )
    arguments.workload = names[0] if names else arguments.workload
    return precisions


def parse_size(name: str, text: str | None, units: Mapping[str, float], example: str) -> float:
    """Return the number, without its unit: '80GB' -> 80e9; None -> 0. Raises ValueError."""
    if text is None:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?) ?([a-z]*)", text.lower())
    if not match or match[2] not in units or not float(match[1]):
        unit = " with its unit" if "" not in units else ""
        raise ValueError(f"{name} must be a number above 0{unit}, as in {example}, got {text!r}")
    return float(match[1]) * units[match[2]]


def _check_options(arguments: argparse.Namespace, precisions: Sequence[str], *other_texts: str) -> None:
    """Raise ValueError for an option of formats that none of the texts uses, and a container too narrow for one."""
    options, texts = vars(arguments), (*precisions, *other_texts)
    setups = {text: parse_setups(text, options) for text in texts}
    names = {name for text in texts for name in used_options(text, options)}
    idle = {"format", "min_weight_bits", "block_size"} - names
    if not precisions:
        idle |= {"container"}
    elif not any(setup.mode for text in texts for setup in setups[text]):  # which convert no layer
        idle |= {"exclude", "tied"}
    refuse_idle(arguments, sorted(idle), f"for {', '.join(precisions)}" if precisions else "without a precision")
    for setup in (setup for text in precisions for setup in setups[text]):
        narrow = arguments.container and arguments.container < setup.container_bits
        refuse((narrow, f"container must be {setup.container_bits} for {setup}, got {arguments.container}"))


def _setups(arguments: argparse.Namespace, *other_texts: str) -> list[Setup]:
    """Return the precisions of the words, each in its own format, or in that of the options; none: bf16. Raises
    ValueError.

    Args:
        other_texts: precisions that options of formats may be for too.
    """
    precisions = _precisions(arguments) or ["bf16"]
    _check_options(arguments, precisions, *other_texts)
    return [setup for text in precisions for setup in parse_setups(text, vars(arguments))]


def _buffer(arguments: argparse.Namespace, hardware: Hardware) -> float:
    """Return the bytes of the buffer on chip that is asked for, or that the hardware's file states; else 0."""
    return parse_size("buffer", arguments.buffer, _BYTES, "20MB") or hardware.sram


def _limits(workload: Workload, setups: list[Setup], hardware: Hardware, buffer: float) -> Iterator[str]:
    """Yield what a buffer changes, and which setups need more memory than the hardware has."""
    peaks = {str(setup): peak_memory(workload, Method("", setup)).peak for setup in setups}
    too_large = [f"{name} {peak / GIGA:,.1f} GB" for name, peak in peaks.items() if peak > hardware.memory_bytes > 0]
    if too_large:
        room = f"more than the {hardware.memory_bytes / GIGA:,.1f} GB of one {hardware.name}"
        yield f"memory: the step needs {room}: {', '.join(too_large)}. dsq-cost plan names what fits."
    if buffer:
        again = sum(t.bytes for setup in setups for t in transfers(workload, setup, buffer) if t.kind == "again")
        least = "what tiles fetch again through it counts" if again else "it holds all tiles: nothing is fetched again"
        yield f"buffer of {buffer / 1e6:,.4g} MB: {least}."


def facts(workload: Workload, hardware: Hardware | None = None) -> Record:
    record: Record = {"workload": workload.name, "tokens": workload.tokens, "parameters": workload.parameters}
    return record | {"macs": workload.macs, "source": workload.source} | (hardware_facts(hardware) if hardware else {})


def named(setup: Setup) -> Record:
    return {"setup": str(setup), "format": setup.family, "precision": str(setup.precision), "mode": setup.mode}


def heading(workload: Workload, hardware: Hardware) -> str:
    return (
        f"{workload.name}: {workload.parameters:,} parameters, {workload.tokens:,} tokens a step, "
        f"{workload.macs / 1e9:,.1f} GMAC a step; on {hardware.name}"
    )


def floor_record(floor: Floor) -> Record:
    return {
        **{"gflop": floor.flops / 1e9, "flop_per_byte": floor.intensity},
        "ridge": floor.ridge if floor.compute_seconds else None,
        **{"bound": "memory" if floor.memory_bound else "compute", "expected_ms": floor.seconds * 1e3},
    }


# ---- estimate: precisions, or the levels of a run, in one line each


def estimate(arguments: argparse.Namespace) -> Answer:
    """Return a record for each setup, and their mean by the shares of the work that a run does at each."""
    relative_to = arguments.relative_to
    setups = _setups(arguments, *[relative_to] * (relative_to != arguments.parser.get_default("relative_to")))
    worked = _shares(arguments.rise_at, len(setups))
    word = whole_number("word", arguments.word, 1, MAX_WORD)
    hardware = load_hardware(arguments.hardware)
    workload = asked(**vars(arguments), cpu=hardware.cpu).build()
    units = parse_setups(relative_to, vars(arguments))
    if len(units) > 1:
        raise ValueError(f"relative_to must be one precision, as [16,4,4,16], got {relative_to!r}")
    buffer = _buffer(arguments, hardware)
    records, by_bits = _estimates(workload, setups, units[0], hardware, buffer, word)
    uses = _uses({str(setup): setup.mode for setup in setups})
    notes = [*_limits(workload, setups, hardware, buffer), *(f"{use}." for use in uses)]
    notes += [_MEANING.format(units[0], word), f"times: {hardware.rates}."]
    notes += [_JOULES if any("joules" in record for record in records) else _NO_JOULES]
    notes += _widened(setups, workload, hardware)
    if worked:
        records.append(_mean_record(records, worked))
        by_bits.append(_mean_record(by_bits, worked))
    sections = [
        Section("estimates", heading(workload, hardware), records, "estimates"),
        Section("by_bits", _BY_BITS, by_bits, "traffic"),
        Section("estimates", _IN_CONTAINERS, records, "traffic"),
    ]
    return Answer(sections, notes, facts(workload, hardware) | {"buffer_bytes": buffer, "word_bits": word})


def _shares(rise_at: str | None, levels: int) -> list[float]:
    """Return each level's share of a run, as --rise-at says; none without it. Raises ValueError where it does not
    fit."""
    if not rise_at:
        return []
    try:
        moments = [float(word) for word in rise_at.split()]
    except ValueError:
        moments = []
    if not moments or not all(0 < moment < 1 for moment in moments):
        raise ValueError(f"rise_at must be fractions of the run between 0 and 1, as in 0.8, got {rise_at!r}")
    return shares(parse_rise_at(moments, levels))


_BY_BITS = "DRAM of linear layers in MB, by tensor at the bits of the level (the paper's count; their sum is dram)"
_IN_CONTAINERS = "DRAM of the step in MB, by tensor in containers of 16 or 32 bits, a packed stash at q1"
_MEANING = (
    "relative to {}. dram, arithmetic: linear layers by the paper's accounting, each operand at its own bits, a block "
    "of bfp or snvint in whole words of {} (--word, docs/cost-model.md). Other columns: the whole step (optimizer, "
    "attention, norms) in containers, as a GPU runs it. linears stash: what converted layers save for the backward: "
    "a float as it is, codes beside it; model saved: what the whole model saves."
)


_JOULES = (
    "joules: estimated, of DRAM bytes and of multiply-adds alone, with neither idle power nor control; their sources: "
    "hardware_sources of --json."
)
_NO_JOULES = "no joules: the hardware's file states no [energy] for each unit that runs."


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
    whole = sum(transfer.bytes for transfer in transfers(workload, unit, buffer))
    whole_arithmetic, whole_of_step = arithmetic(unit), arithmetic_cost(matmuls(workload, unit))
    records, by_bits = list[Record](), list[Record]()
    for setup in setups:
        cost, bits = evaluate(workload, setup, hardware, buffer), moved_bits(workload, setup, buffer, word)
        by_bits.append(named(setup) | _megabytes({kind: size / 8 for kind, size in bits.items()}))
        record = named(setup) | {"arithmetic": arithmetic(setup) / whole_arithmetic}
        record |= {"dram": sum(bits.values()) / whole_bits}
        record |= {"dram_in_containers": cost.dram_bytes / whole, "dram_MB": cost.dram_bytes / 1e6}
        record |= _megabytes(cost.traffic | {"linears_stash": cost.stash_bytes, "model_saved": cost.saved_bytes})
        record |= {"arithmetic_of_step": cost.arithmetic / whole_of_step}
        record |= floor_record(cost.total)
        records.append(record | ({} if cost.joules is None else {"joules": cost.joules}))
    return records, by_bits


def _megabytes(sizes: Mapping[str, float]) -> Record:
    return {f"{name.replace(' ', '_')}_MB": size / 1e6 for name, size in sizes.items()}


#: columns that are rates or names, of which a run has no mean
_NO_COSTS = ("setup", "format", "precision", "mode", "share", "flop_per_byte", "ridge", "bound")


def _mean_record(records: list[Record], worked: Sequence[float]) -> Record:
    """Return the run's record; each level's is given its share."""
    for record, share in zip(records, worked, strict=True):
        record["share"] = share
    mean: Record = {
        "setup": f"{records[0]['format']} mean".strip(),
        "format": records[0]["format"],
        "precision": "mean",
        "mode": "",
        "share": 1.0,
    }
    costs = [name for name in records[0] if name not in _NO_COSTS and all(name in record for record in records)]
    return mean | {name: sum(record[name] * record["share"] for record in records) for name in costs}


# ---- roofline: intensity, bound and time of each class of operations, and the picture

_OF_ROOF = (
    "runs in: 3 x a unit is three passes of it, over parts of codes that are wider than it holds. of roof: of what the "
    "fastest unit that the class runs on reaches at this intensity; less where products take several passes, {}. "
    "bound: of more than half of the time."
)
#: whether a kernel computes while it moves -> why a class is below its roof
_BELOW = {True: "or some kernels wait for DRAM and others for units", False: "and as a kernel computes or moves"}


def roofline(arguments: argparse.Namespace) -> Answer:
    hardware, setups = load_hardware(arguments.hardware), _setups(arguments)
    workload = asked(**vars(arguments), cpu=hardware.cpu).build()
    buffer = _buffer(arguments, hardware)
    of_setups = [_classes(workload, setup, hardware, buffer) for setup in setups]
    records = [record for classes, _ in of_setups for record in classes]
    notes = [*_limits(workload, setups, hardware, buffer)]
    notes += [f"{note} {_by_bits(workload, setup, buffer)}" for setup, (_, note) in zip(setups, of_setups, strict=True)]
    if arguments.picture:
        from dsq.costmodel.cli.pictures.roofline import draw_roofline

        dots = [record for record in records if "tflops" in record]
        write_whole(arguments.picture, lambda path: draw_roofline(path, workload.name, hardware, dots))
    notes += [*(f"{use}." for use in _uses({record["setup"]: record["mode"] for record in records}))]
    notes += [*_widened(setups, workload, hardware), _OF_ROOF.format(_BELOW[hardware.efficiency.overlaps])]
    notes += [f"times: {hardware.rates}."]
    section = Section("classes", heading(workload, hardware), records, "classes")
    return Answer([section], notes, facts(workload, hardware) | {"buffer_bytes": buffer})


def _by_bits(workload: Workload, setup: Setup, buffer: float) -> str:
    """Return the traffic of linear layers by the paper's accounting and in containers, in a sentence; empty: there is
    none."""
    if not any(gemm.weight for gemm in workload.gemms):
        return ""
    whole, moved = (sum(t.bytes for t in transfers(workload, candidate, buffer)) for candidate in (FIXED_32, setup))
    shares = f"{dram(workload, setup, buffer):.3f} of fixed-point 32 by bits, {moved / whole:.3f} in containers"
    return f"DRAM: {shares}, as drawn."


def _classes(workload: Workload, setup: Setup, hardware: Hardware, buffer: float) -> tuple[list[Record], str]:
    """Return a record for each class of operations, and one for all; and a note of what bounds the step."""
    products = matmuls(workload, setup)
    classes = floors(transfers(workload, setup, buffer), products, hardware, setup.container_bits)
    total = sum(classes.values(), start=ZERO)
    records: list[Record] = []
    for name, floor in {**classes, "total": total}.items():
        class_rates = rates(products, name, hardware)
        record = named(setup) | {"class": name, **floor_record(floor), "runs_in": ", ".join(sorted(class_rates))}
        record |= {"dram_MB": floor.bytes / 1e6, "of_time": floor.seconds / total.seconds}
        record |= {"tflops": floor.flops_per_second / 1e12} if floor.flops else {}
        records.append(record | (_roof(floor, list(class_rates.values()), hardware) if name != "total" else {}))
    longest = max(classes, key=lambda name: classes[name].seconds)
    waits = "DRAM" if classes[longest].memory_bound else "arithmetic"
    share = classes[longest].seconds / total.seconds
    note = f"{setup}: {longest} bounds the step, {share:.0%} of its time, and waits for {waits}; in all"
    return records, f"{note} {total.waiting_seconds / total.seconds:.0%} of the time waits for DRAM."


def _roof(floor: Floor, class_rates: list[Rate], hardware: Hardware) -> Record:
    """Return the fastest unit of a class, and the most that it reaches at the class's intensity."""
    peaks = {rate.peak.datatype: rate.peak.flops for rate in class_rates} or {"vector": hardware.vector_flops}
    unit = max(peaks, key=lambda name: peaks[name])
    slope = hardware.bandwidth * floor.intensity
    roof = min(slope, peaks[unit])
    reached = floor.flops_per_second / roof if roof else None
    return {"roof": "DRAM" if slope < peaks[unit] else unit, "roof_tflops": roof / 1e12, "of_roof": reached}
