"""dsq-cost as a user meets it: answers in three forms, one clear line for bad input; the commands and ten answers
of docs/cost-model.md, as they stand there."""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from dsq import costmodel
from dsq.costmodel.cli import main as cli
from dsq.costmodel.cli.commands.step import plan
from dsq.costmodel.cli.main import main, parser
from dsq.costmodel.hardware.hardware import load_hardware, profile_names
from dsq.costmodel.model.methods import DSQ, Setup, is_precision, parse_setups
from dsq.costmodel.model.roofline import STEP_CLASSES, evaluate
from dsq.costmodel.model.traffic import KINDS
from dsq.costmodel.workloads.named import load_workload
from dsq.formats import FORMATS, Format, register
from dsq.precision import Precision
from tests.costmodel.workloads.models import small_gpt2

ROOT = Path(__file__).parents[3]
TERMINAL = 100  #: characters of a line


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"dsq-cost \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_models_name_cannot_act_on_the_terminal(capsys, tmp_path):
    config = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "_name_or_path": "evil\x1b]0;title\x07"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run(capsys, "estimate", "[8,4,8,8]", "--workload", str(tmp_path))
    assert out.startswith(r"evil\x1b]0;title\x07: ")


@pytest.mark.parametrize("option", ["--no-such-option", "--out"])  # --out was once taken for --output
def test_every_error_names_the_command_and_options_are_not_abbreviated(option, capsys):
    for command in cli.COMMANDS:
        needed = ["[16,4,4,16]"] * {"estimate": 1, "roofline": 1, "calibrate": 1, "trace": 2}.get(command, 0)
        with pytest.raises(SystemExit):
            main([command, *needed, option])
        nearest = "; nearest is --output" if option == "--out" else ""
        assert capsys.readouterr().err == f"dsq-cost {command}: error: unrecognized arguments: {option}{nearest}\n"


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--seq-len", "here it is --tokens"),
        ("--batch_size", "nearest is --batch-size"),
        ("--gpu", "here it is --hardware NAME, or --gpus N for how many"),
        ("--tp=8", "here it is --tensor"),
        ("--attention", "here it is --fused-attention or --eager-attention"),
        ("--gradient-checkpointing", "here it is a row of the table (recompute)"),
        ("--optimiser", "here it is --optimizer"),
        ("--nodes", "here it is --gpus N, of all nodes"),
        ("--bf16", "here it is a row of the table (bf16)"),
    ],
)
def test_other_programs_spellings_are_hinted(option, meant, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "gpt2", option])
    assert capsys.readouterr().err.endswith(f"{option}; {meant}\n")


def test_all_hardware_is_a_table_of_devices(capsys):
    for options, absent in ([], {"cost"}), (["--price", "2"], set()):
        _, text, _ = run(capsys, "plan", "gpt2", "--hardware", "all", "--train-tokens", "1B", *options, "--csv")
        records = list(csv.DictReader(io.StringIO(text)))
        assert len(records) > 20
        assert {record["least"] for record in records} == {"1"}
        assert {"device", "method", "tokens/s", "hours", "cost"} - set(records[0]) == absent
    arguments = parser().parse_args(["plan", "gpt2", "--hardware", "all", "--gpus", "8", "--zero", "1"])
    assert plan(arguments).sections[0].title.endswith(" devices fit a step of 8,192 tokens, 8 of each, ZeRO 1")


def test_all_hardware_says_how_many_of_how_many(capsys):
    words = "plan", "llama-3-8b", "--hardware", "all", "--gpus", "8", "--zero", "3", "--train-tokens", "1e9"
    text = run(capsys, *words, "--price", "2")[1]
    planned = len(costmodel.compare_devices("llama-3-8b", gpus=8, zero=3))  # without those that state no memory or link
    assert re.search(
        rf"^llama-3-8b: \d\d of {planned} devices fit a step of 16,384 tokens, 8 of each, ZeRO 3$", text, re.MULTILINE
    )
    assert planned < len(profile_names())
    assert re.search(r"^NVIDIA T4 +15, ZeRO 3 +-", text, re.MULTILINE)
    assert "cost: at 2 an hour and device." in text


def test_natural_spellings(capsys):
    words = "plan", "llama-3-8b", "--hardware", "h100-80gb", "--tokens", "2e3", "--json", "--lora"
    data = json.loads(run(capsys, *words)[1])
    assert (data["best"], data["tokens"]) == ("LoRA 16", 2000)
    assert "of a training are --train-tokens" in run(capsys, "plan", "llama-3-8b", "--tokens", "1e9")[2]
    assert "nearest are fp8_tensor, fp8_row," in run(capsys, "estimate", "fp8")[2]


def test_a_schedule_is_read_as_everywhere_in_the_project(capsys):
    """One text, as fairseq's flags and DSQConfig have it, or a word a level."""
    for levels in (["[4,3,3,8]", "[8,4,4,8]"], ["mxfp4", "bf16"], ["[4,4,4,4]", "nvfp4-nvidia"]):
        answers = [run(capsys, "estimate", *words, "--json")[1] for words in ([" ".join(levels)], levels)]
        assert answers[0] == answers[1]
        assert [record["precision"] for record in json.loads(answers[0])["estimates"]] == levels


@pytest.mark.parametrize(
    ("words", "levels"),
    [
        (["16,4,4,16"], ["[16,4,4,16]"]),
        (["16 4 4 16"], ["[16,4,4,16]"]),
        (["8 8 | 8 8 | 8 8"], ["[8 8 | 8 8 | 8 8]"]),
        (["nvfp4/nvfp4_2d,mxfp8,nvfp4~,bf16"], ["[nvfp4/nvfp4_2d,mxfp8,nvfp4~,bf16]"]),
        (["4,3,3,8", "8,4,4,8", "--rise-at", "0.8"], ["[4,3,3,8]", "[8,4,4,8]", "mean"]),
    ],
)
def test_levels_need_no_brackets_in_words_either(words, levels, capsys):
    estimates = json.loads(run(capsys, "estimate", *words, "--json")[1])["estimates"]
    assert [record["precision"] for record in estimates] == levels


@pytest.mark.parametrize("name", ["gpt2", "models/a,3.json", "7b", "mine4"])
def test_a_models_name_is_no_precision(name):
    assert not is_precision(name)
    assert is_precision("16,4,4,x")  # whose fault is named


def test_a_plan_takes_precisions_by_name(capsys):
    precisions = ["nvfp4-nvidia", "mxfp4 all", "[- - | - - | - grid:1,0,6.0,1x32,e8m0,floor,0,1.0]"]
    data = json.loads(run(capsys, "plan", "gpt2", *precisions, "--json")[1])
    assert data["workload"] == "gpt2"
    assert {"mxfp4 all", "nvfp4-nvidia"} <= {it["method"].partition(":")[2] or it["method"] for it in data["methods"]}
    assert "deepseek-v3 is a recipe, not a model: give both, as in gpt2" in run(capsys, "plan", "deepseek-v3")[2]
    assert "a format of your own as its text" in run(capsys, "plan", "gpt2", "mine4")[2]


@pytest.mark.parametrize(
    ("level", "significands"),
    [
        ("[bf16,bf16,fp16,bf16]", {"x": 8, "w": 8, "dy_for_dx": 11, "w_for_dx": 8, "dy_for_dw": 8, "x_for_dw": 8}),
        ("[- - | - - | - msfp16]", {"x": 8}),
        ("[fp16 - | - - | - -]", {"x": 11, "dy_for_dw": 11}),  # "-": as the float that is named
    ],
)
def test_each_float_of_a_level_has_its_own_significand(level, significands):
    (setup,) = parse_setups(level, {"format": "snvint"})
    assert {name: setup.operands[name].multiplier_bits for name in significands} == significands


def test_a_roofline_of_the_pages_chip_as_it_is_printed(capsys, tmp_path, monkeypatch):
    """bf16 unless told; what does not fit, and a buffer that holds all tiles, are said in a line each."""
    page = (ROOT / "docs/cost-model.md").read_text().partition("## A hardware file")[2]
    (tmp_path / "mine.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.search("`dsq-cost (roofline .*)`", page)[1])
    data = json.loads(run(capsys, *words, "--json")[1])
    assert {(it["setup"], it["class"]): round(it.get("of_roof", 1), 2) for it in data["classes"]} == {
        ("bf16", name): 1 for name in (*STEP_CLASSES, "total")
    }
    assert data["buffer_bytes"] == 48e6
    assert data["notes"][0].startswith("memory: the step needs more than the 64.0 GB of one my chip: bf16 ")
    assert data["notes"][1] == "buffer of 48 MB: it holds all tiles: nothing is fetched again."
    assert "counts" in json.loads(run(capsys, *words, "--buffer", "256kB", "--json")[1])["notes"][1]


def test_dram_by_tensor_is_counted_in_bits_and_in_containers(capsys):
    """A float that is saved stands under stash as codes do; blocks fill words, unless a word is a bit."""
    words = "estimate", "bfp4", "mxfp4", "fp32", "--relative-to", "fp32", "--json"
    padded, packed = (json.loads(run(capsys, *words, "--word", word)[1]) for word in ("64", "1"))
    assert [it["dram"] for it in padded["estimates"]] == pytest.approx([0.25, 4.25 / 32, 1], rel=1e-3)
    assert [it["dram"] for it in packed["estimates"]] == pytest.approx([4.5 / 32, 4.25 / 32, 1], rel=1e-3)
    bfp4, mxfp4, fp32 = packed["by_bits"]
    assert bfp4["weights_MB"] / fp32["weights_MB"] == pytest.approx(4.5 / 32)
    assert fp32["stash_written_MB"] == fp32["stash_read_MB"] == fp32["activations_read_MB"] > mxfp4["stash_read_MB"]
    assert sum(bfp4[name] for name in bfp4 if name.endswith("MB")) == pytest.approx(
        packed["estimates"][0]["dram"] * sum(fp32[name] for name in fp32 if name.endswith("MB"))
    )
    saved = packed["estimates"][2]
    assert saved["stash_read_MB"] >= saved["linears_stash_MB"] > 0 == saved["stash_written_MB"]


def test_a_multiplier_sees_the_significand_of_a_float(capsys):
    """bf16's has 8 bits, fp16's 11, fp32's 24, the hidden one included."""
    words = "estimate", "bf16", "float:[16,16,16,16]", "fp16", "--relative-to", "fp32", "--json"
    data = json.loads(run(capsys, *words)[1])["estimates"]
    shares = [(8 / 24) ** 2, (8 / 24) ** 2, (11 / 24) ** 2]
    for name in ("arithmetic", "arithmetic_of_step"):
        assert [it[name] for it in data] == pytest.approx(shares)


def test_adamw_is_adam(capsys):
    assert json.loads(run(capsys, "plan", "gpt2", "--optimizer", "AdamW-8bit", "--json")[1])["optimizer"] == "adam-8bit"


def test_floats_by_name_cost_what_their_bits_do(capsys):
    """And a plan's fp32 is that of the usual table."""
    costs = ("peak_GB", "step_ms", "graphs_ms", "mode", "largest_batch")
    usual = {it["method"]: it for it in json.loads(run(capsys, "plan", "gpt2", "--json")[1])["methods"]}
    words = ("fp32", "bf16", "float:[32,32,32,32]", "float:[16,16,16,16]")
    asked = json.loads(run(capsys, "plan", "gpt2", *words, "--json")[1])["methods"]
    for method, name in zip(asked, ("fp32", "bf16", "fp32", "bf16"), strict=True):
        assert [method[cost] for cost in costs] == [usual[name][cost] for cost in costs]
    data = json.loads(run(capsys, "estimate", *words, "[fp32 fp32 | - - | - -]", "--json")[1])["estimates"]
    for it in data:
        del it["setup"], it["format"], it["precision"]
    fp32, bf16, *others = data
    assert others == [fp32, bf16, fp32]
    assert (fp32["dram"], bf16["dram"]) == (1, 0.5)


def test_a_format_is_one_text_in_all_commands(capsys):
    def arithmetic(text):
        return json.loads(run(capsys, "estimate", text, "--json")[1])["estimates"][0]["arithmetic_of_step"]

    for name in ("bfp4", "mxfp4:rceil", "grid:1,0,6.0,1x32,e8m0,floor,0,1.0", "bfp:bits=4,block_size=32"):
        assert arithmetic(name) == arithmetic(f"[{name} {name} | {name} {name} | {name} {name}]")
        assert json.loads(run(capsys, "plan", name, "--json")[1])["best"] == name


@pytest.mark.parametrize("text", ["float:[8,8,8,8]", "float:bits=4", "[8,4,8,float8]"])
def test_floats_have_16_or_32_bits(text, capsys):
    status, _, error = run(capsys, "estimate", text)
    assert (status, error.count("\n")) == (2, 1)


def test_estimate_is_the_models(capsys):
    asked = ["--workload", "opt_1.3b", "--hardware", "h100", "--relative-to", "[16,4,4,16]", "--json"]
    _, text, _ = run(capsys, "estimate", "[16,4,4,16]", *asked)
    (record,) = json.loads(text)["estimates"]
    assert (record["dram"], record["arithmetic"]) == (1, 1)
    cost = evaluate(load_workload("opt_1.3b"), Setup(DSQ, Precision(16, 4, 4, 16)), load_hardware("h100"))
    assert record["dram_MB"] == cost.dram_bytes / 1e6
    assert record["linears_stash_MB"] == cost.stash_bytes / 1e6 < record["model_saved_MB"]


def test_an_estimate_begins_with_the_papers_traffic_and_has_containers_beside(capsys):
    """Table 1: 0.50 of fixed-point 32 at 16 bits, 0.63 in bfp, 0.45 at [16,4,4,16]."""
    setups = ["fixed:[16,16,16,16]", "bfp:[16,16,16,16]", "bfp:[16,4,4,16]", "bfp:[2,2,2,16]", "float:[16,16,16,16]"]
    _, text, _ = run(capsys, "estimate", *setups, "--json")
    records = json.loads(text)["estimates"]
    assert [round(record["dram"], 3) for record in records] == [0.5, 0.625, 0.438, 0.202, 0.5]
    containers = [record["dram_of_step"] for record in records]
    assert containers[-1] < 0.45 < min(containers[:-1]) < max(containers) < 0.75  # floats are not quantized first
    assert list(records[0])[4:7] == ["arithmetic", "dram", "dram_of_step"]
    kinds = [f"{kind.replace(' ', '_')}_MB" for kind in KINDS[:-1]]
    for record in records:
        assert sum(record[kind] for kind in kinds) == pytest.approx(record["dram_MB"])


@pytest.mark.parametrize("setup", ["bfp:[16,4,4,16]", "fixed:[32,32,32,32]", "mxfp4", "bf16"])
def test_a_setup_relative_to_itself_is_1(setup, capsys):
    _, text, _ = run(capsys, "estimate", setup, "--relative-to", setup, "--json")
    (record,) = json.loads(text)["estimates"]
    assert [record[name] for name in ("dram", "dram_of_step", "arithmetic")] == [1, 1, 1]


def test_the_page_has_the_figures_of_the_papers_accounting(capsys, tmp_path):
    """And of the chip that it writes down, which stores converted layers at their own bits."""
    mine = tmp_path / "mine.toml"
    mine.write_text(PAGE.partition("```toml\n")[2].partition("```")[0].replace("sram", "#"))
    rows = re.findall(r"^\| (\w+ \[[\d,]+\]) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    setups = [name.replace(" ", ":") for name, *_ in rows]
    gpu, chip = (
        json.loads(run(capsys, "estimate", *setups, "--hardware", hardware, "--json")[1])
        for hardware in ("a100-80gb", str(mine))
    )
    answers = zip(rows, gpu["estimates"], chip["estimates"], strict=True)
    for (_, dram, arithmetic, of_step, own_bits), record, own in answers:
        assert (f"{record['dram']:.4f}", f"{record['arithmetic']:.4f}") == (dram, arithmetic)
        assert (f"{record['dram_of_step']:.3f}", f"{own['dram_of_step']:.3f}") == (of_step, own_bits)
        assert (own["dram"], own["arithmetic"]) == (record["dram"], record["arithmetic"])
        assert own["dram_of_step"] < record["dram_of_step"]
    assert len(rows) == 3
    assert "of converted layers at the bits of the level" in chip["notes"][-3]
    assert chip["rates"].endswith("in words of 64")


def test_a_level_costs_the_weight_that_runs(capsys):
    """dx of q1 = 2 multiplies w in 5 bits, as dsq runs it, unless the paper's Q1 is asked for; dw reads x at q1."""
    costs = []
    for option in ([], ["--min-weight-bits", "0"]):
        _, text, _ = run(capsys, "estimate", "fixed:[8,2,2,16]", *option, "--json")
        costs.append(json.loads(text)["estimates"][0]["arithmetic_of_step"])
    assert costs[0] > costs[1]


@pytest.mark.parametrize("command", ["estimate", "roofline", "plan"])
def test_answers_say_which_levels_simulate_and_which_save(command, capsys):
    levels = ("[-,4,-,-]", "fixed:[-,4,-,-]", "fixed:[8,4,8,8]")
    text = " ".join(run(capsys, command, *levels, "--workload", "gpt2")[1].split())
    assert "simulation (products are quantized): fixed [8,4,8,8]" in text
    assert "saving (products are the trainer's, saved tensors are packed): snvint [-,4,-,-] / fixed [-,4,-,-]" in text


@pytest.mark.parametrize(
    ("precision", "option"),
    [
        ("mxfp4", "--block-size 64"),
        ("nvfp4-nvidia", "--format bfp"),
        ("bfp4", "--min-weight-bits 0"),
        ("[8 8 | 8 8 | 8 4]", "--min-weight-bits 0"),
        ("fixed:[4,4,4,4]", "--block-size 8"),
        ("bfp:[4,4,4,4]", "--format fixed"),
        ("bf16", "--exclude ."),
        ("float:[32,32,32,32]", "--tied"),
    ],
)
def test_options_that_change_nothing_are_refused(precision, option, capsys):
    refusal = f"{option.split()[0]} does nothing for {precision}: leave it out"
    for command in ["estimate"], ["roofline"], ["plan", "gpt2"]:
        answer = run(capsys, *command, precision, *option.split())
        assert answer == (2, "", f"dsq-cost {command[0]}: error: {refusal}\n")
    assert run(capsys, "estimate", precision, "[8,4,8,8]", *option.split())[0] == 0


def test_containers_hold_what_lies_in_them(capsys):
    asked = ["estimate", "[8,4,8,8]", "--relative-to", "float:[32,32,32,32]", "--csv"]
    assert run(capsys, *asked, "--container", "16") == run(capsys, *asked)
    for name in ("fp32", "fixed [32,8,8,8]"):
        status, _, error = run(capsys, "estimate", name.replace(" ", ":"), "--container", "16")
        assert (status, error) == (2, f"dsq-cost estimate: error: container must be 32 for {name}, got 16\n")


def test_asked_methods_are_all_shown(capsys):
    _, _, error = run(capsys, "plan", "gpt2", "mxfp4", "--all")
    assert error.endswith("--all does nothing with precisions, which are all shown: leave it out\n")


def test_options_change_what_is_costed(capsys):
    def dram(*options):
        _, text, _ = run(capsys, "estimate", "[16,4,4,16]", *options, "--csv")
        return float(next(csv.DictReader(io.StringIO(text)))["dram_MB"])

    base = dram()
    assert dram("--fused-attention") < base == dram("--eager-attention")
    assert dram("--tokens", "16") < base
    assert dram("--exclude", "fc2") < base  # whose operands are not quantized first
    assert dram("--container", "32") > base
    assert dram("--block-size", "8") > base
    assert dram("--format", "bfp") < base  # snvint: a byte a tensor
    assert dram("--format", "fixed") < base
    assert dram("--sequences", "64") < base


def test_a_tied_projection_is_converted_where_that_is_asked_for(capsys):
    sizes = []
    for option in ([], ["--tied"]):
        _, text, _ = run(capsys, "estimate", "[8,4,8,8]", "--workload", "gpt2", *option, "--json")
        sizes.append(json.loads(text)["estimates"][0]["linears_stash_MB"])
    assert sizes[0] < sizes[1]
    _, _, error = run(capsys, "estimate", "[8,4,8,8]", "--workload", "llama-2-7b", "--tied")
    assert error.endswith("--tied does nothing for llama-2-7b, whose projection is not tied: leave it out\n")


def test_levels_of_a_run_are_weighed_by_where_they_rise(capsys):
    levels = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")
    how = ["--rise-at", "0.2 0.7", "--relative-to", levels[-1], "--csv"]
    _, text, _ = run(capsys, "estimate", *levels, *how)
    *each, mean = csv.DictReader(io.StringIO(text))
    for column in ("dram", "arithmetic"):
        expected = sum(share * float(record[column]) for share, record in zip((0.2, 0.5, 0.3), each, strict=True))
        assert float(mean[column]) == pytest.approx(expected)
        assert float(each[-1][column]) == 1


def test_a_run_has_joules_where_each_of_its_levels_has(capsys, tmp_path):
    hardware, profile = tmp_path / "mine.toml", Path(cli.__file__).parents[1] / "hardware/profiles/a100-80gb.toml"
    hardware.write_text(profile.read_text().replace(", int8 = 0.1", ""))
    levels = ["bfp:[8,8,8,8]", "fixed:[8,8,8,8]"]  # int8 has no energy
    for order in (levels, levels[::-1]):
        status, text, _ = run(capsys, "estimate", *order, "--rise-at", "0.5", "--hardware", str(hardware), "--csv")
        *each, mean = csv.DictReader(io.StringIO(text))
        assert status == 0
        assert sorted(bool(record["joules"]) for record in each) == [False, True]
        assert not mean["joules"]


def test_what_a_hardware_file_leaves_out_is_said(capsys, tmp_path):
    """Unquantized products run in fp32 where no faster peak holds 16-bit floats; joules need [energy]."""
    hardware = tmp_path / "mine.toml"
    hardware.write_text("""
name = "mine"
bandwidth = { gb_per_s = 512 }
vector = { tflops = 8 }
peak = [
    { datatype = "fp32", tflops = 16, holds = { float = 32 } },
    { datatype = "bfp16", tflops = 64, holds = { bfp = 16 } },
]
""")
    asked = ["bfp:[8,8,8,16]", "--workload", "opt_1.3b", "--hardware"]
    for command in "estimate", "roofline":
        texts = [" ".join(run(capsys, command, *asked, name)[1].split()) for name in (str(hardware), "a100-80gb")]
        assert ["[8,8,8,16]: unquantized products take 169.3 ms in a wider unit" in text for text in texts] == [
            True,
            False,
        ]
        assert ["no joules:" in text for text in texts] == [command == "estimate", False]


@pytest.mark.parametrize("size", ["10", "0kB", "20Mb/s"])
def test_sizes_have_a_unit(size, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", "mxfp4", "--buffer", size])
    error = f"argument --buffer: must be a number above 0 with its unit, as in 80GB or 24MiB, got {size!r}\n"
    assert capsys.readouterr().err.endswith(error)
    assert run(capsys, "estimate", "mxfp4", "--buffer", "64B")[0] == 0


def test_files_of_a_sweep_can_be_joined(capsys):
    for command in "estimate", "roofline":
        asked = ["--workload", "gpt2", "--hardware", "h100", "--buffer", "1MB", "--csv"]
        record = next(csv.DictReader(io.StringIO(run(capsys, command, "mxfp4", *asked)[1])))
        names = ("workload", "tokens", "hardware", "buffer_bytes")
        assert [record[name] for name in names] == ["gpt2", "1024", load_hardware("h100").name, "1000000.0"]
    (record, *_) = csv.DictReader(io.StringIO(run(capsys, "plan", "gpt2", "--devices", "2", "--csv")[1]))
    assert (record["workload"], record["devices"], record["optimizer"]) == ("gpt2", "2", "adam")


def test_a_plan_warns_of_levels_that_damage_training(capsys):
    text = " ".join(run(capsys, "plan", "gpt2", "bfp:[2,2,2,16]", "[8,4,8,8]")[1].split())
    assert text.count("may damage training") == 1
    assert "[2,2,2,16] may damage training, which needed 4, 3 and 3 bits" in text


def test_a_folder_with_a_config_is_a_model(capsys, tmp_path):
    config = small_gpt2(tmp_path)
    _, folder, _ = run(capsys, "plan", str(tmp_path), "--gpus", "2", "--batch-size", "4", "--csv")
    _, file, _ = run(capsys, "plan", config, "--devices", "2", "--sequences", "4", "--csv")
    assert folder == file


def test_a_plan_shows_what_is_advised_and_explains_its_names(capsys):
    shown, every = (run(capsys, "plan", "gpt2", *option)[1] for option in ([], ["--all"]))
    assert "bf16, mesa " not in shown.partition("the peak")[0]
    assert "bf16, mesa " in every.partition("the peak")[0]
    assert "recompute: a checkpoint around each layer" in " ".join(shown.split())
    assert "mesa: saved tensors in 8 bits" not in shown
    assert "mesa: saved tensors in 8 bits" in " ".join(every.split())


def test_the_figures_that_test_the_papers_model_are_named_once(capsys):
    text = " ".join(run(capsys, "table", "1", "6")[1].split())
    tests = "DRAM of bfp [16,16,16,16], arithmetic of bfp [16,4,4,16], DRAM of bfp [16,4,4,16]."
    assert f"3 figures, which rows repeat, test the model: {tests}" in text


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_has_examples_and_no_line_wider_than_a_terminal(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"] if command else ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  dsq-cost" in text
    assert max(map(len, text.splitlines())) < TERMINAL


def test_no_query_imports_torch_or_pandas():
    """A cold query stays fast. It runs in a process of its own, because this one has imported them."""
    for arguments in (["estimate", "[16,4,4,16]"], ["table"], ["plan"]):
        code = f"import sys; from dsq.costmodel.cli.main import main; main({arguments}); "
        code += "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"


PAGE = (ROOT / "docs/cost-model.md").read_text()
QUESTIONS, _ = PAGE.split("On this machine", 1)
DOCUMENTED = [command for command in re.findall("`dsq-cost (.*?)`", QUESTIONS) if not command.startswith("calibrate")]


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_documented_command_answers_within_a_terminals_width_and_in_every_form(
    command, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analysis").symlink_to(ROOT / "analysis")
    small_gpt2(tmp_path)
    status, table, err = run(capsys, *shlex.split(command))
    assert (status, err) == (0, "")
    assert len(table.splitlines()) > 3
    assert max(map(len, table.splitlines())) < TERMINAL
    arguments = shlex.split(re.sub(r" --(picture|html) \S+", "", command))
    status, text, _ = run(capsys, *arguments, "--json")
    assert status == 0
    records = [record for section in json.loads(text).values() if isinstance(section, list) for record in section]
    assert any(isinstance(record, dict) for record in records)
    status, text, _ = run(capsys, *arguments, "--csv")
    assert status == 0
    assert list(csv.DictReader(io.StringIO(text)))
    before = set(tmp_path.iterdir())
    assert run(capsys, *arguments, "--csv", "--output", "out") == (0, "", "")
    assert Path("out").read_text() == text
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out"}  # no temporary left


# ---- the ten questions

ROWS = re.findall(r"^\| `(.*?)` \| (.*?) \|$", PAGE.split("| `dsq-cost plan` | answer |")[1], re.MULTILINE)[:7]


@pytest.mark.parametrize(("question", "stated"), ROWS, ids=[question.split()[0] for question, _ in ROWS])
def test_an_answer_is_the_pages(question, stated):
    answer = plan(parser().parse_args(["plan", *shlex.split(question)]))
    best = next(record for record in answer.sections[0].records if record["method"] == answer.facts["best"])
    method, gigabytes, fits, milliseconds = re.match(r"(.*): ([\d.,]+) GB, (.*); ([\d,]+) ms", stated).groups()
    assert (method, fits.replace("fits", "yes")) == (best["method"], best["fits"])
    assert float(gigabytes) == pytest.approx(best["peak_GB"], abs=0.06)
    assert float(milliseconds.replace(",", "")) == pytest.approx(best["step_ms"], rel=0.01, abs=0.6)


# ---- a format that enters the registry is costed with no line of its own in the cost model


@pytest.fixture
def ask(capsys, tmp_path):
    """The first record of the answer about one layer of 64 tokens, 64 in, 64 out, while there is a format with blocks
    of 32, four bytes a tensor, a magnitude one bit under BFP's."""

    @register
    @dataclass(frozen=True, slots=True)
    class Boxed(Format):
        name: ClassVar[str] = "boxed4"
        tensor_bytes: ClassVar[int] = 4

        block_size: int = 32

        @property
        def significand_bits(self) -> int:
            return self.bits - 2

    path = tmp_path / "layer.json"
    layer = {"op": "gemm", "name": "fc", "M": 64, "K": 64, "N": 64}
    path.write_text(json.dumps({"costmodel": 1, "name": "layer", "tokens": 64, "operations": [layer]}))

    def answer(*arguments):
        assert main([*arguments, "--workload", str(path), "--csv"]) == 0
        return next(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    yield answer
    del FORMATS["boxed4"]


def test_bytes_of_a_new_format_by_name_and_by_prefix_and_the_options_of_its_fields(ask):
    def stash(*arguments):
        return float(ask("estimate", *arguments)["linears_stash_MB"]) * 1e6

    for words in (["boxed4:[8,8,8,16]"], ["[8,8,8,16]", "--format", "boxed4"]):
        assert stash(*words) == pytest.approx(64 * 64 + 64 * 2 + 4)  # two scales a row
    assert stash("boxed4:[8,8,8,16]", "--block-size", "16") == pytest.approx(64 * 64 + 64 * 4 + 4)
    assert stash("boxed4:[8,32,8,8]") == pytest.approx(64 * 64 * 4)  # values as they are


def test_hardware_multiplies_a_new_format_where_it_holds_the_significands_of_blocks(ask):
    runs_in = [ask("roofline", f"boxed4:[{m},{m},{m},{m}]")["runs_in"] for m in (8, 10, 11, 13, 14)]
    assert runs_in == ["bf16", "bf16", "tf32", "tf32", "4 x bf16"]  # a bit more than BFP's 9 and 12
