"""Each figure of docs/cost-model.md that no other test gives again."""

import csv
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from analysis.published import FIRST_FLASH, RUNS, Residual, included, judged, judged_once, published, residuals
from dsq.costmodel.hardware.hardware import Efficiency, load_hardware
from dsq.costmodel.model.ledger import FUSED
from dsq.costmodel.model.memory import peak_memory
from dsq.costmodel.model.methods import AUTOCAST, BF16, DSQ, FP32, OPTIMIZERS, Method, Setup, parse_setups, whole_stash
from dsq.costmodel.paper.calibrated import arithmetic, dram
from dsq.costmodel.paper.tables import silicon_rows, static_rows
from dsq.costmodel.planning.plan import NF4_BITS, RESERVED, Question
from dsq.costmodel.planning.step import RANGES, step_time
from dsq.costmodel.workloads.config_json import transformer_of
from dsq.costmodel.workloads.named import AskedStep, load_workload
from dsq.costmodel.workloads.transformer import build
from dsq.operands import MIN_WEIGHT_BITS
from dsq.precision import Precision
from tests.costmodel.test_published import WITHIN

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "costmodel/hardware/profiles"
PAGE = (ROOT / "docs/cost-model.md").read_text()
TEXT = " ".join(PAGE.split())
with RUNS.with_name("published.csv").open(newline="", encoding="utf-8") as lines:
    PUBLISHED = list(csv.DictReader(lines))


def table(first: str) -> list[list[str]]:
    """The cells of the rows below the table's head, which begins with ``first``."""
    rows = PAGE[PAGE.index(first) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


OF = {
    "MPT, not fitted": ("judging", "ratio"),
    "the same, as shipped": ("judging", ""),
    "others": ("others", "ratio"),
    "by the command line": ("commands", "ratio"),
}
PEAKS = [(one["measure"], one["of_peak"]) for one in PUBLISHED if one["of_peak"]]
PEAKS += [(one["measure"], one["ratio"]) for one in judged_once() if one["kind"] == "memory"]
PEAKS = [("nvidia-smi" if measure == "process" else measure, ratio) for measure, ratio in PEAKS]


@pytest.mark.parametrize("row", table("| trainings |"), ids=lambda row: row[0])
def test_the_table_of_published_trainings(row):
    if measure := row[0].partition("peaks, ")[2]:
        ratios = np.array([float(ratio) for kind, ratio in PEAKS if kind == measure])
    elif row[0] == "the same, as shipped":
        ratios = np.array([judged(one, as_shipped=True)["ratio"] for one in published() if one["half"] == "judging"])
    else:
        half, column = OF[row[0]]
        ratios = np.array([float(one[column]) for one in PUBLISHED if one["half"] == half and one[column]])
    off = abs(ratios - 1)
    shares = [f"{np.median(off):.1%}", f"{(off <= 0.15).mean():.0%}", f"{(off <= 0.25).mean():.0%}"]
    quantiles = [f"{quantile:.2f}" for quantile in np.quantile(ratios, [0, 0.1, 0.9, 1])]
    assert row[1:] == [str(len(ratios)), *(share.replace("%", " %") for share in shares), *quantiles]


def test_counts_and_extremes_of_published_trainings():
    every = [*PUBLISHED, *judged_once()]
    refused = [one["training"] for one in every if one["fits"] == "no"]
    assert refused == ["GPT 52B ZeRO-3"]
    assert f"Of {len(every)} rows all but one are told to fit" in TEXT
    assert sum(one["half"] in ("fitted", "judging") for one in PUBLISHED) == 104
    ratios = {f"{float(one['ratio']):.2f}" for one in PUBLISHED if one["ratio"]}
    extremes = re.findall(r"\d\.\d\d", TEXT[TEXT.index("**Times are too short**") : TEXT.index("**Compiled**")])
    assert len(extremes) == 5
    assert set(extremes) <= ratios


def test_the_published_trainings_are_described():
    halves = [one["half"] for one in PUBLISHED]
    mpt = [one for one in PUBLISHED if one["half"] in ("fitted", "judging")]
    devices = [int(one["devices"]) for one in mpt]
    assert {one["hardware"][:4] for one in mpt} == {"a100", "h100"}
    counts = len(mpt), min(devices), max(devices), halves.count("others"), halves.count("commands")
    assert "{} are of MPT on {} to {} A100 and H100".format(*counts) in TEXT
    assert "{} are of others, such as Llama 2 and 3. {} were asked".format(*counts[3:]) in TEXT
    assert "with the usual one 25 of its 104 trainings are told not to)" in TEXT  # test_published.py


def test_the_first_sentences_are_what_the_tables_say():
    medians = {row[0]: float(row[2].partition(" ")[0]) for row in table("| trainings |")}
    times = [round(medians[name]) for name in OF]
    assert f"its step times are {min(times)} to {max(times)} % off in the median" in TEXT
    reserved = median(float(ratio) for measure, ratio in PEAKS if measure == "reserved")
    assert f"its peaks of allocated memory {medians['peaks, allocated']:.0f} %" in TEXT
    assert f"the allocator reserves {RESERVED - 1:.0%} more".replace("%", " %") in TEXT
    assert pytest.approx(1, abs=0.005) == reserved
    columns = zip(*(row[1:] for row in table("| | peak, GB: predicted, measured")), strict=True)
    pairs = [[[float(number.strip(" *")) for number in cell.split(",")] for cell in column] for column in columns]
    worst = [max(abs(predicted / measured - 1) for predicted, measured in column) for column in pairs]
    assert "on an H100 peaks are {:.0%} off at most, times {:.0%}".format(*worst).replace("%", " %") in TEXT


def test_which_attention_the_trainings_of_mpt_ran():
    rate = load_hardware("a100-80gb").attention
    assert f"the first FlashAttention, at {FIRST_FLASH}; profiles have the second one's {rate} (" in TEXT
    ran, shipped = (row[2] for row in table("| trainings |")[:2])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Its median error is {shipped} for step times of 52 trainings of MosaicML's MPT" in readme
    assert f"({ran} with the attention kernel that they ran), {table('| trainings |')[3][2]} for 37" in readme


def test_how_far_attention_on_an_a100_is_fitted():
    """Trainings on A100 whose attention is fused, but for MPT's."""
    off = {"fitted": [], "judging": []}
    for row, stated in zip(included(), PUBLISHED, strict=True):
        of_a100 = row["table"] != "mpt" and stated["hardware"].startswith(("a100", "8xA100", "A100"))
        if of_a100 and stated["ratio"] and "--eager" not in row["layout"]:
            name = " ".join(row[column] for column in list(row)[:14])
            off[Residual(name, "", "", 0).half].append(abs(float(stated["ratio"]) - 1))
    for row in judged_once():
        if "--hardware a100" in row["command"] and "--eager" not in row["command"] and row["kind"] != "memory":
            off[Residual(f"{row['source']} {row['training']}", "", "", 0).half].append(abs(float(row["ratio"]) - 1))
    (fitted, judging), told = off.values(), tomllib.loads((PROFILES / "a100-80gb.toml").read_text())["attention"]
    stated = f"{len(fitted)} of {len(fitted) + len(judging)} are {median(fitted):.0%} off in the median, the other"
    assert f"{stated} {len(judging)} {median(judging):.0%}.".replace("%", " %") in told["efficiency_source"]


def test_ranges_and_how_many_times_lie_within():
    named = {
        "eager": "eager, one node, HBM",
        "several nodes": "several nodes",
        "GDDR": "GDDR memory",
        "compiled": "compiled",
    }
    rows = {row[0]: row[1:] for row in table("| kind | range")}
    for kind, name in named.items():
        halves = [f"{within} of {count}" for count, within in WITHIN[kind]]
        assert rows[name] == ["{:.2f} to {:.2f}".format(*RANGES[kind]), *halves]


def test_the_halves_that_fitted_a_constant_and_judge_it():
    listed = [one for one in residuals(kinds=["GDDR"]) if one.program != "once"]
    halves = [[abs(one.time - 1) for one in listed if one.half == half] for half in ("fitted", "judging")]
    told = len(halves[0]), len(listed), median(halves[0]), len(halves[1]), median(halves[1])
    template = "{} of {} trainings fitted this; they are {:.0%} off, the other {} {:.0%}"
    assert template.format(*told).replace("%", " %") in TEXT


def test_figures_that_were_judged_once():
    def off(rows, column="ratio"):
        return f"{100 * median(abs(float(row[column]) - 1) for row in rows):.1f} %"

    def of_kind(kind):
        return [row for row in rows if row["kind"] == kind]

    rows = judged_once()
    peaks, times = of_kind("memory"), [row for row in rows if row["kind"] != "memory"]
    gathered = rows[:93], rows[93:151], rows[151:]
    first, second, third = ([row for row in some if row["kind"] != "memory"] for some in gathered)
    first_peaks, second_peaks, third_peaks = ([row for row in some if row["kind"] == "memory"] for some in gathered)
    assert f"**Judged once**: {len(rows)} figures" in TEXT
    at_first = (
        f"At first {len(first)} times were {off(first, 'at_first')} off in the median and {len(first_peaks)} peaks"
    )
    assert f"{at_first} {off(first_peaks, 'at_first')}; of a second gathering {len(second)} times" in TEXT
    assert f"{off(second, 'at_first')}, 27 of them in the printed range, {len(second_peaks)} peaks" in TEXT
    refused = [sum(row["fits_at_first"] == "no" for row in some) for some in gathered[1:]]
    assert f"{off(second_peaks, 'at_first')}, and {refused[0]} rows were told not to fit; of a third" in TEXT
    told = f"{len(third)} times {off(third, 'at_first')}, 34 in the range, {len(third_peaks)} peaks"
    assert f"{told} {off(third_peaks, 'at_first')}, and {refused[1] or 'none'} was." in TEXT
    assert f"all times are {off(times)} off, eager {off(of_kind('eager'))} ({len(of_kind('eager'))})" in TEXT
    assert f"compiled {off(of_kind('compiled'))} ({len(of_kind('compiled'))}), GDDR {off(of_kind('GDDR'))}" in TEXT
    assert f"{sum(row['within'] == 'yes' for row in times)} in the range; {len(peaks)} peaks {off(peaks)}" in TEXT
    wrong = [row for row in rows if abs(float(row["ratio"]) - 1) > 0.15]
    doubtful = sum(bool(row["doubt"]) for row in wrong)
    assert f"{doubtful} of the {len(wrong)} rows that are over 15 % off" in TEXT
    slow = [float(row["ratio"]) for row in rows if row["training"].startswith("fairseq 8xa100")]
    assert f"fairseq on A100 at small batches, {min(slow):.1f} to {max(slow):.1f} times too fast" in TEXT
    limited = next(float(row["ratio"]) for row in rows if "B200" in row["source"] and row["kind"] == "compiled")
    assert f"a B200 whose power was limited, {limited:.1f}" in TEXT
    allocated = f"{100 * median(abs(float(ratio) - 1) for kind, ratio in PEAKS if kind == 'allocated'):.1f} %"
    last = (
        f"{off(times)} for {len(times)} gathered last ({off(times, 'at_first')} before causes they share were fixed); "
    )
    last += f"{allocated} for peaks of allocated memory, {off(peaks)} for {len(peaks)} peaks gathered last"
    assert last in " ".join((ROOT / "README.md").read_text().split())


def test_constants_that_the_page_names():
    assert f"the sum before it move {FUSED['norm']} of their bytes, 8 of 11 tensors" in TEXT
    assert f"kernels reach {load_hardware('rtx-4090').efficiency.memory} of the bandwidth" in TEXT
    assert f"they reach; {Efficiency().memory} in files" in TEXT
    assert f"**Experts** reach {Efficiency().experts} of" in TEXT
    assert f"A step waits for {Efficiency().exposed} of the time of sending" in TEXT
    assert f"the weight of the backward in max(q1, min(q0, {MIN_WEIGHT_BITS})) bits" in TEXT
    assert f"NF4 ({NF4_BITS:.2f} bits with scales)" in TEXT
    assert f"keeps {OPTIMIZERS['adam-8bit'].state:.2f} bytes for its moments" in TEXT
    adam, small = OPTIMIZERS["adam"], OPTIMIZERS["adam-16bit"]
    assert f"fp32 master weights, gradients and moments ({2 * 4 + adam.state} bytes a parameter)" in TEXT
    assert f"`adam-16bit` {2 * 2 + small.state} in all" in TEXT
    assert f"an A100 of 80 GB: {load_hardware('a100-80gb').memory_bytes / 1e9}e9 bytes" in TEXT


def test_memory_of_models_that_run():
    """analysis/results/memory.md: saved bytes and peaks, predicted over measured; fairseq's worst peak is named."""
    rows = [line.split("|") for line in (ROOT / "analysis/results/memory.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) > 8 and "%" in row[5]]
    saved, peaks = ([abs(float(row[column].rstrip("%"))) for row in rows] for column in (5, 8))
    worst = sorted(peaks)[-1]
    assert rows[peaks.index(worst)][1].startswith("fairseq")
    others = [peak for row, peak in zip(rows, peaks, strict=True) if peak != worst]
    stated = f"Saved bytes are {median(saved):.1f} % off in the median and {max(saved):.1f} % at worst, peaks"
    assert f"{stated} {median(peaks):.1f} % and {max(others):.1f} %." in TEXT
    assert f"has a peak {worst:.1f} % off" in TEXT


def test_adamw_that_is_not_fused():
    steps = [
        Question(AskedStep("mistral-7b", 4, 4096), load_hardware("a100-80gb"), optimizer="adam-16bit", foreach=once)
        for once in (True, False)
    ]
    peaks = [
        next(row for row in one.ask(batches=False).rows if row.method.name == "bf16, recompute").memory.peak / 1e9
        for one in steps
    ]
    assert "took 72.97 GB, {:.1f} is predicted, {:.1f} without it".format(*peaks) in TEXT


def test_a_run_wholly_at_the_first_level_does_not_reach_the_headline():
    """20.95 x and 2.55 x against fixed-point 16."""
    low, sixteen = (parse_setups(level, {})[0] for level in ("bfp:[2,2,2,16]", "fixed:[16,16,16,16]"))
    workload = load_workload("transformer_iwslt_de_en")
    less = arithmetic(sixteen) / arithmetic(low), dram(workload, sixteen) / dram(workload, low)
    assert "a run wholly at [2,2,2,16] gains {:.1f} x and {:.2f} x".format(*less) in TEXT


def test_the_papers_tables():
    rows = [row for number in (1, 6) for row in static_rows(number)]
    figures = [(row, column) for row in rows for column in ("arith", "dram") if row[f"{column}_fits"] == "test"]
    off = max(abs(row[f"{column}_off"]) for row, column in figures if not (row["contradicts"] and column == "dram"))
    assert f"are within {off:.1%}".replace("%", " %") in TEXT
    chips = sorted(row["off"] for row in silicon_rows())
    assert "by {:.0f} and {:.0f} %".format(*(100 * chip for chip in chips)) in TEXT


def test_fewer_bits_make_larger_tiles():
    low, workload = parse_setups("bfp:[2,2,2,16]", {})[0], load_workload("opt_1.3b")
    shares = dram(workload, low), dram(workload, low, 256e3)
    assert "takes {:.3f} of fixed-point 32's traffic, and {:.3f} through 256 kB".format(*shares) in TEXT


# ---- an H100


def gpt(layers: int, width: int, heads: int):
    """The GPT of analysis.gpu.training: 8 x 1,024 tokens, without dropout, its gelu one kernel, its head not tied."""
    config = {"model_type": "gpt2", "vocab_size": 50304, "n_embd": width, "n_layer": layers, "n_head": heads}
    config |= {"n_positions": 1024, "activation_function": "gelu"}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return build(replace(transformer_of(config, "a GPT"), sequences=8, target_length=1024)).fusing_attention()


EIGHT = Setup(DSQ, Precision(8, 4, 8, 8))
METHODS = {
    "fp32": Method("", FP32),
    "bf16 autocast": Method("", AUTOCAST),
    "with checkpoints": Method("", BF16, recompute=True),
    "[8,4,8,8]": Method("", EIGHT),
    "[8,4,8,8] all": Method("", EIGHT, stash=whole_stash(EIGHT)),
}


def test_the_table_of_an_h100():
    with (ROOT / "analysis/results/gpu_steps.csv").open(newline="", encoding="utf-8") as file:
        steps = {(row["model"], row["setup"]): row for row in csv.DictReader(file) if "H100" in row["machine"]}
    model, hardware, workload = "", load_hardware("h100"), None
    for label, gigabytes, milliseconds in table("| | peak, GB: predicted, measured"):
        name = label.rpartition("million, ")[2].rpartition("billion, ")[2]
        if name != label:
            model = label.removesuffix(f", {name}")
            workload = gpt(12, 768, 12) if model == "124 million" else gpt(24, 2048, 16)
        predicted = (
            peak_memory(workload, METHODS[name]).peak / 1e9,
            1e3 * step_time(workload, METHODS[name], hardware).seconds,
        )
        stated = [float(cells.split(", ")[0]) for cells in (gigabytes, milliseconds)]
        assert stated == pytest.approx(predicted, rel=2e-3), label
        setup = {"fp32": "fp32", "bf16 autocast": "bf16", "with checkpoints": "bf16, checkpoints"}.get(name)
        row = steps[
            model, setup or {"[8,4,8,8]": "dsq [8,4,8,8], linears", "[8,4,8,8] all": "dsq [8,4,8,8], all"}[name]
        ]
        assert float(gigabytes.split(", ")[1]) == pytest.approx(float(row["peak MiB"]) * 2**20 / 1e9, abs=0.01)
        if not milliseconds.endswith("*"):
            assert float(milliseconds.split(", ")[1]) == pytest.approx(float(row["graph ms"] or row["ms"]), abs=0.06)


def test_gpt_2_of_transformers_is_slower_than_mpts():
    """The gelu of eight kernels, dropout, and a loss in fp32."""
    usual = load_workload("gpt2", True, sequences=8)
    times = [
        step_time(workload, Method("", BF16), load_hardware("a100-40gb")).seconds
        for workload in (usual, gpt(12, 768, 12))
    ]
    assert times[0] / times[1] > 1.2
