"""dsq-cost as a user meets it: answers in three forms, pictures, and one clear line for bad input."""

import csv
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.cli.main import EXAMPLES, main
from costmodel.cli.measured_runs import load_runs
from costmodel.hardware.hardware import load_hardware
from costmodel.model.estimate import evaluate
from costmodel.model.quantisation import DSQ, Setup
from costmodel.workloads.named import load_workload
from dsq.precision import Precision

COMMANDS = {
    "estimate": ["estimate", "[16,4,4,16]", "fixed:[16,16,16,16]"],
    "estimate, paper": ["estimate", "[16,4,4,16]", "--profile", "paper"],
    "plan": ["plan"],
    "plan, shared out": ["plan", "[16,4,4,16]", "float:[16,16,16,16]", "--devices", "8", "--zero", "3"],
    "table": ["table"],
    "roofline": ["roofline", "[16,4,4,16]", "[2,2,2,16]"],
    "roofline, by operation": ["roofline", "[16,4,4,16]", "--per-operation", "--hardware", "h100"],
    "sweep": ["sweep", "--q0", "2:4", "--q1", "2:4", "--q2", "4", "--q3", "8,16"],
    "cheapest": ["cheapest", "analysis/results/demo_formats.csv"],
    "solve": ["solve", "[16,4,4,16]"],
    "solve, no energy": ["solve", "[4,4,4,16]", "--hardware", "laptop-cpu", "--gain", "1.2"],
    "explain": ["explain", "[16,4,4,16]"],
    "explain, paper": ["explain", "[16,4,4,16]", "--profile", "paper"],
}


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_command_answers_in_every_form(arguments, capsys, tmp_path):
    status, table, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert len(table.splitlines()) > 3
    status, text, _ = run(capsys, *arguments, "--json")
    data = json.loads(text)
    assert status == 0
    records = [record for section in data.values() if isinstance(section, list) for record in section]
    assert any(isinstance(record, dict) for record in records)
    status, text, _ = run(capsys, *arguments, "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert status == 0
    assert rows
    path = tmp_path / "out"
    assert run(capsys, *arguments, "--csv", "--output", str(path)) == (0, "", "")
    assert path.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no temporary left


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("workload", ["opt_1.3b", "transformer_iwslt_de_en"])
def test_no_line_is_wider_than_a_terminal(arguments, workload, capsys):
    chosen = ["--workload", workload] if arguments[0] != "table" else []
    _, text, _ = run(capsys, *arguments, *chosen)
    assert max(map(len, text.splitlines())) < 100


@pytest.mark.parametrize("command", EXAMPLES)
def test_no_line_of_help_is_wider_than_a_terminal(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) < 100


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"dsq-cost \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_what_figures_are_relative_to(capsys):
    """A setup relative to itself is 1, in either profile and in a sweep."""
    own = ["--relative-to", "[16,4,4,16]", "--json"]
    for profile in ("first-principles", "paper"):
        _, text, _ = run(capsys, "estimate", "[16,4,4,16]", "--profile", profile, *own)
        (record,) = json.loads(text)["estimates"]
        assert (record["dram"], record["arithmetic"]) == (1, 1)
    _, text, _ = run(capsys, "sweep", "--q0", "16", "--q1", "4", "--q2", "4", "--q3", "16", *own)
    (record,) = json.loads(text)["front"]
    assert (record["dram"], record["arithmetic"]) == (1, 1)


TABLE_6 = "import sys; from costmodel.cli.main import main; sys.exit(main(['table', '6', '--csv', '-o', {!r}]))"


def table_6(path, **options):
    """The command in a process of its own, writing to `path`."""
    root = Path(__file__).parents[3]
    return subprocess.run([sys.executable, "-c", TABLE_6.format(str(path))], cwd=root, check=True, **options)


def test_special_files_are_written_through(tmp_path):
    """Standard output by its names, a device, a FIFO and what a link points at get the bytes, and stay what they
    are."""
    whole = tmp_path / "whole.csv"
    table_6(whole)
    expected = whole.read_bytes()
    for name in ("-", "/dev/stdout"):
        assert table_6(name, stdout=subprocess.PIPE).stdout == expected
    device = tmp_path / "null"  # a copy of /dev/null where one can be made, so that no bug harms the machine's own
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        device = Path("/dev/null")
    table_6(device)
    assert stat.S_ISCHR(device.stat().st_mode)
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "target.csv")
    table_6(link)
    assert link.is_symlink()
    assert (tmp_path / "target.csv").read_bytes() == expected
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE)
    table_6(fifo)
    assert reader.communicate(timeout=60)[0] == expected
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_every_error_names_the_command(capsys):
    for command in ("estimate", "table", "roofline", "sweep", "explain", "plan", "solve", "calibrate"):
        needed = ["[16,4,4,16]"] if command in ("roofline", "explain", "solve", "calibrate") else []
        with pytest.raises(SystemExit):
            main([command, *needed, "--no-such-option"])
        assert capsys.readouterr().err == f"dsq-cost {command}: error: unrecognized arguments: --no-such-option\n"


def test_estimate_is_the_models(capsys):
    _, text, _ = run(capsys, "estimate", "[16,4,4,16]", "--workload", "opt_1.3b", "--hardware", "h100", "--json")
    (record,) = json.loads(text)["estimates"]
    cost = evaluate(load_workload("opt_1.3b"), Setup(DSQ, Precision(16, 4, 4, 16)), load_hardware("h100"))
    assert record["dram_MB"] == cost.dram_bytes / 1e6
    assert record["linears_stash_MB"] == cost.stash_bytes / 1e6 < record["model_saved_MB"]


def test_explain_adds_up_to_the_estimate(capsys):
    _, text, _ = run(capsys, "explain", "[16,4,4,16]", "--csv")
    total = sum(int(row["total"]) for row in csv.DictReader(io.StringIO(text)))
    _, text, _ = run(capsys, "estimate", "[16,4,4,16]", "--csv")
    assert float(next(csv.DictReader(io.StringIO(text)))["dram_MB"]) == total / 1e6


def test_options_change_what_is_costed(capsys):
    def dram(*options):
        _, text, _ = run(capsys, "estimate", "[16,4,4,16]", *options, "--csv")
        return float(next(csv.DictReader(io.StringIO(text)))["dram_MB"])

    base = dram()
    assert dram("--gemms-only") < base
    assert dram("--fused-attention") < base
    assert dram("--quantise-attention") < base
    assert dram("--exclude", "output_projection") > base
    assert dram("--box", "8") > base
    assert dram("--format", "bfp", "--exponent-bits", "4") < dram("--format", "bfp") < base  # snvint: a byte a tensor
    assert dram("--format", "fixed") < base
    assert dram("--sequences", "64") < base


@pytest.mark.parametrize("profile", ["paper", "first-principles"])
def test_history_gives_the_weighted_mean(profile, capsys, tmp_path):
    path = tmp_path / "history.json"
    levels = [([2, 2, 2, 16], 300), ([16, 4, 4, 16], 100)]
    path.write_text(json.dumps({"levels": [{"precision": p, "updates": 1, "tokens": n} for p, n in levels]}))
    _, text, _ = run(capsys, "estimate", "--history", str(path), "--profile", profile, "--csv")
    first, second, mean = csv.DictReader(io.StringIO(text))
    for column in ("dram", "arithmetic"):
        assert float(mean[column]) == pytest.approx(0.75 * float(first[column]) + 0.25 * float(second[column]))


def test_levels_of_a_run_are_weighed_by_where_they_rise(capsys):
    levels = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]")
    _, text, _ = run(capsys, "estimate", *levels, "--rise-at", "0.2 0.7", "--profile", "paper", "--csv")
    *each, mean = csv.DictReader(io.StringIO(text))
    for column in ("dram", "arithmetic"):
        expected = sum(share * float(record[column]) for share, record in zip((0.2, 0.5, 0.3), each, strict=True))
        assert float(mean[column]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "recorded, options, same_as, note",
    [
        ("output_projection|fc", [], ["--exclude", "output_projection|fc"], "leaves the layers that it matches"),
        ("output_projection|fc", ["--exclude", "fc1"], ["--exclude", "fc1"], ""),
        ("lm_head", [], [], "matches none of the workload's converted layers"),
        ("fc", ["--profile", "paper"], ["--profile", "paper"], "the paper profile costs every linear layer"),
        (None, [], [], ""),
    ],
)
def test_history_is_costed_with_the_runs_exclude(recorded, options, same_as, note, capsys, tmp_path):
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"exclude": recorded, "levels": [{"precision": [2, 2, 2, 16], "updates": 1}]}))
    status, text, _ = run(capsys, "estimate", "--history", str(path), *options, "--json")
    assert status == 0
    found = json.loads(text)
    _, text, _ = run(capsys, "estimate", "[2,2,2,16]", *same_as, "--json")
    (alone,) = json.loads(text)["estimates"]
    assert found["estimates"][0] == alone | {"share": 1.0}
    assert bool(note) == any("the run's exclude" in line for line in found["notes"])
    assert any(note in line for line in found["notes"])


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
@pytest.mark.parametrize("command", ["roofline", "sweep"])
def test_pictures_are_whole_files(command, suffix, magic, capsys, tmp_path):
    path = tmp_path / f"picture{suffix}"
    status, out, _ = run(capsys, *COMMANDS[command], "--picture", str(path))
    assert status == 0
    assert out
    assert path.read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


BAD = {
    "precision": (
        ["estimate", "[16,4,4]"],
        "precision must be four whole numbers in 2..32, as in [16,4,4,16], got '[16,4,4]'",
    ),
    "no precision": (["estimate"], "give one or more precisions, or --history FILE"),
    "workload": (["estimate", "[16,4,4,16]", "--workload", "opt-1.3b"], "nearest is 'opt_1.3b'"),
    "no near workload": (
        ["estimate", "[4,4,4,16]", "--workload", "llama-7b"],
        "'llama-7b': workloads are transformer_",
    ),
    "negative": (["estimate", "[16,4,4,16]", "--sequences", "-2"], "sequences must be a whole number"),
    "not a number": (["estimate", "[16,4,4,16]", "--box", "x"], "argument --box: invalid int value"),
    "hardware": (["estimate", "[16,4,4,16]", "--hardware", "h300"], "unknown hardware 'h300'"),
    "no folder": (["estimate", "[16,4,4,16]", "--output", "/no/such/folder/x"], "there is no folder /no/such/folder"),
    "a folder": (["table", "--output", "/"], "output / is a folder"),
    "picture": (["roofline", "[16,4,4,16]", "--picture", "x.jpg"], "must end in .png or .svg"),
    "one file for both": (["sweep", "--picture", "x.png", "-o", "./x.png"], "output ./x.png is the picture too"),
    "unwritable picture": (["sweep", "--picture", "/proc/x.png"], "output /proc/x.png cannot be written"),
    "history": (["estimate", "--history", "/no/such.json"], "/no/such.json cannot be read"),
    "range": (["sweep", "--q1", "0:4"], "range must be widths in 2..32 such as 4, 2:8 or 2:16,32, got '0:4'"),
    "objectives": (["sweep", "--objectives", "speed,dram"], "objectives must be two or more of"),
    "too many": (["sweep", *["--q0", "2:32", "--q1", "2:32", "--q2", "2:32", "--q3", "2:32"]], "narrow a range"),
    "table": (["table", "5"], "table must be one of 1, 6, 7"),
    "size": (["plan", "--fit", "80"], "fit must be a size such as 80GB or 24GiB, got '80'"),
    "no memory": (["plan", "--hardware", "laptop-cpu"], "does not state its memory: give --fit"),
    "no link": (["plan", "--hardware", "laptop-cpu", "--fit", "16GB", "--devices", "2"], "states no link"),
    "gpus": (["plan", "--gpus", "0"], "gpus must be a whole number in 1..16777216, got 0"),
    "many gpus": (["plan", "--gpus", "100000000000"], "gpus must be a whole number in 1..16777216, got 100000000000"),
    "devices": (["plan", "--devices", "0"], "devices must be a whole number from 1, got 0"),
    "idle zero": (["plan", "--zero", "2"], "--zero 2 does nothing on one device"),
    "ledger": (["cheapest", "/no/such.csv"], "ledger /no/such.csv cannot be read: No such file"),
    "accuracy": (["cheapest", "analysis/results/demo_formats.csv", "--accuracy", "nan"], "accuracy must be a number"),
    "no ledger": (["cheapest", "analysis/results/kernels.csv"], "has no column score"),
    "gain": (["solve", "[4,4,4,16]", "--gain", "0"], "gain must be above 0, got 0"),
    "no codes": (["solve", "float:[16,16,16,16]"], "multiplies no codes"),
    "calibrate": (["calibrate", "mine.txt"], "must end in .toml"),
    "operation": (["explain", "[16,4,4,16]", "--operation", "conv"], "matches none"),
    "regex": (["estimate", "[16,4,4,16]", "--exclude", "("], "must be a regular expression"),
    "idle exclude": (["estimate", "[16,4,4,16]", "--exclude", "conv"], "exclude 'conv' matches none"),
    "idle length": (
        ["roofline", "[16,4,4,16]", "--workload", "opt_1.3b", "--source-length", "8"],
        "source_length does nothing for opt_1.3b",
    ),
    "command": (["cost"], "invalid choice: 'cost'"),
    "idle option": (
        ["estimate", "[16,4,4,16]", "--profile", "paper", "--fused-attention"],
        "--fused-attention does nothing in the paper profile",
    ),
    "idle hardware": (["table", "1", "--hardware", "cpu"], "--hardware does nothing without table 7"),
    "float in paper": (["estimate", "float:[16,16,16,16]", "--profile", "paper"], "use --profile first-principles"),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse's own way out
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


LEDGER = """run,score,measure,seed,format,levels,level_tokens,exclude
a_seed1,90,BLEU,1,,none,,
b_seed1,89.5,BLEU,1,bfp,"[16,4,4,16]",100,output_projection
b_seed2,87.5,BLEU,2,bfp,"[16,4,4,16]",100,output_projection
d_seed1,80,BLEU,1,snvint,"[2,2,2,16] [16,4,4,16]",75 25,output_projection
"""


def test_cheapest_is_the_mean_of_levels_over_seeds(capsys, tmp_path):
    path = tmp_path / "ledger.csv"
    path.write_text(LEDGER)

    def records(*options):
        _, text, _ = run(capsys, "cheapest", str(path), "--json", *options)
        return json.loads(text)["setups"]

    by_name = {record["setup"]: record for record in records("--within", "2")}
    static, two = by_name["bfp [16,4,4,16]"], by_name["snvint [2,2,2,16] 75%, [16,4,4,16] 25%"]
    assert (static["score"], static["seeds"], static["reaches"]) == (88.5, 2, "yes")
    assert two["reaches"] == "no"
    assert records("--accuracy", "70", "--by", "stash")[0] == two | {"reaches": "yes"}
    _, text, _ = run(capsys, "estimate", "[2,2,2,16]", "[16,4,4,16]", "--exclude", "output_projection", "--json")
    low, high = (record["dram_MB"] for record in json.loads(text)["estimates"])
    assert two["dram_MB"] == pytest.approx(0.75 * low + 0.25 * high, rel=1e-3)  # a scale more, of the whole tensor


def test_cheapest_tells_apart_what_its_ledger_does(capsys, tmp_path):
    """Runs of one schedule that differ otherwise are no seeds of each other, and boxes cost as they were trained."""
    path = tmp_path / "ledger.csv"
    path.write_text("""run,score,measure,format,levels,level_tokens,box
bfp_4_seed1,80,BLEU,bfp,"[4,4,4,16]",100,16
bfp_4_box=64_seed1,70,BLEU,bfp,"[4,4,4,16]",100,64
bfp_4_box=64_seed2,72,BLEU,bfp,"[4,4,4,16]",100,64
bfp_4_stash=all_seed1,60,BLEU,bfp,"[4,4,4,16]",100,16
""")
    _, text, _ = run(capsys, "cheapest", str(path), "--json")
    found = {record["setup"]: record for record in json.loads(text)["setups"]}
    assert {name: (record["score"], record["seeds"]) for name, record in found.items()} == {
        "bfp [4,4,4,16]": (80, 1),
        "bfp [4,4,4,16] (box=64)": (71, 2),
        "bfp [4,4,4,16] (stash=all)": (60, 1),
    }
    assert found["bfp [4,4,4,16] (box=64)"]["dram_MB"] < found["bfp [4,4,4,16]"]["dram_MB"]


@pytest.mark.parametrize("container", ["16", "32"])
def test_runs_are_costed_with_the_container_that_is_asked_for(container, capsys, tmp_path):
    """As the setups are that they are compared with."""
    ledger, history = tmp_path / "ledger.csv", tmp_path / "history.json"
    ledger.write_text(LEDGER)
    history.write_text(json.dumps({"format": "snvint", "levels": [{"precision": [16, 4, 4, 16], "updates": 1}]}))
    answers = []
    for query in (["estimate", "[16,4,4,16]"], ["estimate", "--history", str(history)]):
        _, text, _ = run(capsys, *query, "--container", container, "--json")
        answers.append({k: v for k, v in json.loads(text)["estimates"][0].items() if k != "share"})
    assert answers[0] == answers[1]
    _, text, _ = run(capsys, "cheapest", str(ledger), "--container", container, "--json")
    (found,) = [record for record in json.loads(text)["setups"] if record["setup"] == "bfp [16,4,4,16]"]
    like = ["bfp:[16,4,4,16]", "--exclude", "output_projection", "--container", container, "--json"]
    _, text, _ = run(capsys, "estimate", *like, "--relative-to", "float:[16,16,16,16]")
    (alone,) = json.loads(text)["estimates"]
    assert (found["dram_MB"], found["dram"], found["ms"]) == (alone["dram_MB"], alone["dram"], alone["floor_ms"])


def test_runs_that_name_no_axis_take_the_one_that_is_given(tmp_path):
    path = tmp_path / "ledger.csv"
    path.write_text(LEDGER)
    (_, *quantised), _ = load_runs(str(path), None, {"box_axis": "last"})
    assert {work.setup.box_axis for setup in quantised for work in setup.history.levels} == {"last"}


def test_cheapest_weighs_by_updates_where_tokens_were_not_counted(capsys):
    """As of fine-tuning."""
    _, text, _ = run(capsys, "cheapest", "analysis/results/finetuned.csv", "--recipe", "sst2_finetuned", "--json")
    assert "snvint [4,3,3,8] 80%, [8,4,4,8] 20%" in {record["setup"] for record in json.loads(text)["setups"]}


@pytest.mark.parametrize(
    "change, message",
    [
        (("BLEU,2", "loss,2"), "mixes what its scores measure: BLEU, loss"),
        (("75 25", "75"), "line 5: 2 levels, but 1 level_tokens"),
        (("75 25", "0 0"), "line 5: no level records any work (level_tokens or level_updates)"),
        (("75 25", "inf 25"), "line 5: level_tokens must be a number in [0, inf), got inf"),
        (("75 25", "-75 175"), "line 5: level_tokens must be a number in [0, inf), got -75.0"),
        (("d_seed1,80", "d_seed1,nan"), "line 5: score must be a number in (-inf, inf), got nan"),
        (('16]",75 25,output_projection', "16]"), "line 5: it has not as many fields as the first line"),
        (('16]",75 25', "16],75 25"), "line 5: it has not as many fields as the first line"),
        (("100,output_projection", "100," + "x" * 2**18), "cannot be read: field larger than field limit"),
        (("[2,2,2,16] ", "[2,2,16] "), "line 5: precision must be four whole numbers"),
    ],
)
def test_a_bad_ledger_names_the_line(change, message, capsys, tmp_path):
    path = tmp_path / "ledger.csv"
    path.write_text(LEDGER.replace(*change))
    status, _, errors = run(capsys, "cheapest", str(path))
    assert status == 2
    assert message in errors


def test_runs_of_two_recipes_are_not_compared(capsys, tmp_path):
    path = tmp_path / "ledger.csv"
    recipes = ("recipe", "one", "one", "one", "other")
    path.write_text("\n".join(map(",".join, zip(recipes, LEDGER.splitlines(), strict=True))))
    status, _, errors = run(capsys, "cheapest", str(path))
    assert status == 2
    assert "--recipe must be one of one, other, got none" in errors
    _, text, _ = run(capsys, "cheapest", str(path), "--recipe", "one", "--json")
    assert [record["score"] for record in json.loads(text)["setups"]] == [90, 88.5]


@pytest.mark.parametrize("option", ["--quantise-attention", "--fused-attention"])
def test_options_of_attention_need_some(option, capsys, tmp_path):
    path = tmp_path / "one_layer.json"
    layer = {"op": "gemm", "name": "fc", "M": 8, "K": 8, "N": 8}
    path.write_text(json.dumps({"costmodel": 1, "name": "one layer", "tokens": 8, "operations": [layer]}))
    status, _, errors = run(capsys, "estimate", "[4,4,4,16]", "--workload", str(path), option)
    assert (status, errors) == (2, f"dsq-cost estimate: error: {option} does nothing for one layer: leave it out\n")


def test_a_history_overrules_no_option_silently(capsys, tmp_path):
    path = tmp_path / "history.json"
    levels = [{"precision": [2, 2, 2, 16], "updates": 1}]
    path.write_text(json.dumps({"format": "bfp", "box": 16, "levels": levels}))
    for option, recorded in (("--format fixed", "bfp"), ("--box 32", "16")):
        status, _, errors = run(capsys, "estimate", "--history", str(path), *option.split())
        assert (status, errors) == (
            2,
            f"dsq-cost estimate: error: {option} does nothing: the history records {recorded}\n",
        )
    assert run(capsys, "estimate", "--history", str(path), "--box-axis", "last")[0] == 0  # it records none


def test_a_failed_picture_leaves_the_old_one(capsys, tmp_path):
    path = tmp_path / "old.png"
    path.write_text("old")
    assert run(capsys, "roofline", "[16,4,4,16]", "--hardware", "none", "--picture", str(path))[0] == 2
    assert path.read_text() == "old"


@pytest.mark.parametrize("command", ["", *EXAMPLES])
def test_help_has_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"] if command else ["--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert "examples:\n  dsq-cost" in help_text


def test_no_query_imports_torch_or_pandas():
    """What keeps a cold query fast; in a process of its own, for this one has imported them."""
    root = Path(__file__).parents[3]
    for arguments in (["estimate", "[16,4,4,16]"], ["table"], ["explain", "[16,4,4,16]"]):
        code = f"import sys; from costmodel.cli.main import main; main({arguments}); "
        code += "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"
