"""Recipes: what they may say, the plan, and going on after a kill."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis import ROOT
from analysis.experiments import glue, report, run
from analysis.experiments.ledger.ledger import add_row, read_ledger
from analysis.experiments.plan.costs import expected
from analysis.experiments.plan.experiment import Data, load_experiment
from analysis.experiments.plan.runs import plan
from analysis.experiments.session import data_folder
from analysis.experiments.session.run_folder import RunFolder

RECIPES = sorted((Path(run.__file__).parent / "recipes").glob("*.toml"))
LEDGERS = sorted(
    path for path in (ROOT / "analysis" / "results").glob("*.csv") if path.read_text().startswith("recipe,")
)
HEAD = """
title = "tiny"
[data]
kind = "generated"
sentences = 60
held_out = 6
vocab = 250
beam = 1
[training]
cpu = true
encoder-layers = 1
decoder-layers = 1
encoder-embed-dim = 16
decoder-embed-dim = 16
encoder-ffn-embed-dim = 32
decoder-ffn-embed-dim = 32
encoder-attention-heads = 2
decoder-attention-heads = 2
max-tokens = 512
max-update = 30
max-epoch = 0
save-interval-updates = 1
keep-interval-updates = 1
log-interval = 1
"""
GRID = """
[options]
seed = [1, 2]
[[runs]]
levels = "none"
[[runs]]
levels = "[2,2,2,16] [16,4,4,16]"
format = ["bfp", "snvint"]
rise_at = 0.5
"""


def recipe(folder: Path, text: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- the recipe ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("title = 3", "title must be a text, got 3"),
        ('titel = "x"', "titel is no key here; accepted are title, data"),
        ('[data]\nkind = "web"', "data.kind must be one of generated, parallel, labelled, finetuning, got 'web'"),
        ('[data]\nkind = "parallel"', "data.path must be given for data.kind = 'parallel'"),
        ('[data]\nkind = "generated"\nvocab = "many"', "data.vocab must be a whole number from 1, got 'many'"),
        ('[data]\nkind = "generated"\nbeam = 0', "data.beam must be a whole number from 1, got 0"),
        (HEAD, "runs must be tables headed [[runs]]"),
        (HEAD + "[[runs]]\nbits = 4", "runs[0].bits is no key here; accepted are seed, levels, format"),
        (HEAD + "[[runs]]\nlevels = 4", "runs[0].levels must be a text, got 4"),
        (HEAD + "[[runs]]\nbox = []", "runs[0].box must be a value, or a list of values"),
        (HEAD + '[[runs]]\npaper = "high"', "runs[0].paper must be a number"),
        (HEAD + "[[runs]]\n[runs.training]\nlr = 1.0", "runs[0].label must be given"),
        (HEAD + "[options]\nseed = [-1]\n[[runs]]", "options.seed must be a whole number from 0, got -1"),
        (HEAD + "seed = 3\n[[runs]]", "training.seed: seeds and DSQ's options go under"),
        ('[data]\nkind = "generated"\npath = "mine"', "data.path mine: data.kind = 'generated' makes its own text"),
        ("[data\n", "Expected ']'"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(text: str, named: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        load_experiment(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "given", "named"),
    [
        ('[[runs]]\nlevels = "[4,4,4,8]"', [], 'runs: levels = "[4,4,4,8]" needs a format'),
        (
            '[[runs]]\nformat = "bfp"\nlevels = "[2,2]"',
            [],
            "run bfp_2-2_seed1: argument --dsq-levels: precision must be",
        ),
        ("[[runs]]\n[[runs]]", [], "runs: two of them are fp32_seed1"),
        ("[[runs]]", ["--set", "data.vocab=many"], "--set data.vocab=many: must be a line of TOML, as in training"),
        ("[[runs]]", ["--set", 'data.vocab="many"'], "data.vocab must be a whole number from 1, got 'many'"),
        ("[[runs]]", ["--set", "datum.vocab=1"], "datum is no key here; accepted are title, data"),
        ("[[runs]]", ["--set", "training.seed=2"], "training.seed: seeds and DSQ's options go under"),
        ("[[runs]]", ["--set", "training.max-epochs=2"], "unrecognized arguments: --max-epochs 2"),
        (
            '[[runs]]\nlevels = "none"',
            ["--set", 'options.levels="[4,4,4,8]"'],
            "changes nothing, as each of [[runs]] has its own levels",
        ),
        ("[[runs]]", ["--only", "sbfp*"], "--only sbfp*: matches no run; the first is fp32_seed1"),
        ("[[runs]]", ["--only", "fp32*", "--only", "snvnt*"], "--only snvnt*: matches no run; the first is fp32_seed1"),
        ("[[runs]]", ["--submitit", "mem_gb=4"], "--submitit mem_gb=4: does nothing without --engine submitit"),
        ("[[runs]]", ["--data", "mine"], "generates its own text: leave --data out"),
        (
            '[[runs]]\nlevels = "[4,4,4,8]"\nformat = "bfp"\nexclude = ["fc(1|2)", "fc[1-2]"]',
            [],
            "runs: two of them are bfp_4-4-4-8_exclude=fc-1-2-_seed1, of {'levels': '[4,4,4,8]', 'format'",
        ),
        (
            '[[runs]]\nlabel = "x"\ntraining = {lr = 1.0}',
            ["--set", "training.lr=2.0"],
            "--set training.lr=2.0: changes nothing, as each of [[runs]] has its own lr",
        ),
        ('[[runs]]\nlabel = "x"\ntraining = {save-dir = "x"}', [], "--save-dir: the recipe relies on its own choice"),
    ],
)
def test_what_no_run_could_use_is_one_line(more, given, named, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert run.main([str(recipe(tmp_path, HEAD + more)), "--out", str(out), *given]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [("max-epoch = 0", "max-epoch must be given beside max-update"), ("max-update = 30", "nothing ends")],
)
def test_what_ends_a_run_is_given(line: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = recipe(tmp_path, HEAD.replace(f"{line}\n", "") + "[[runs]]")
    assert run.main([str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_with_costs(path: Path) -> None:
    experiment = load_experiment(path)
    runs = plan(experiment)
    costed = [one for one in runs if expected(one, experiment.workload)]
    assert {one.levels for one in runs if one not in costed} == {"none"}


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.stem)
def test_every_row_of_a_committed_ledger_is_in_its_recipe(path: Path) -> None:
    rows = read_ledger(path)
    planned = {
        (recipe, one.name): shlex.join(one.flags)
        for recipe in {row["recipe"] for row in rows}
        for one in plan(load_experiment(RECIPES[0].with_name(f"{recipe}.toml")))
    }
    assert {(row["recipe"], row["run"]): row["training"] for row in rows}.items() <= planned.items()


def test_absent_data_say_where_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (wmt,) = (path for path in RECIPES if path.stem == "wmt14_table6")
    given = [str(wmt), "--out", str(tmp_path / "out"), "--only", "fp32*"]
    assert run.main([*given, "--data", str(tmp_path / "no")]) == 2
    said = capsys.readouterr().err
    assert f"data.path {tmp_path / 'no'}: there is no such folder; give --data DIR. " in said
    assert "python -m analysis.experiments.prepare wmt14 DIR" in said
    data = Data(kind="labelled", path=str(tmp_path), task="x", pretrained=str(tmp_path), get="Ask.")
    with pytest.raises(ValueError, match=r"there is no model\.pt\. Ask\."):
        data_folder.check_present(data)
    for name in glue.PRETRAINED:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"encoder\.json: its SHA-256 is e3b0c442"):
        data_folder.check_present(data)


def test_a_grid_is_multiplied_out_and_first_seeds_come_first(tmp_path: Path) -> None:
    runs = plan(load_experiment(recipe(tmp_path, HEAD + GRID)))
    assert [one.name for one in runs] == [
        f"{name}_seed{seed}"
        for seed in (1, 2)
        for name in ("fp32", "bfp_2-2-2-16_16-4-4-16_at0.5", "snvint_2-2-2-16_16-4-4-16_at0.5")
    ]
    flags = runs[1].flags
    assert "--cpu" in flags
    assert flags[flags.index("--dsq-rise-at") + 1] == "0.5"
    assert not any(flag.startswith("--dsq") for flag in runs[0].flags)


# ---- running ------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_a_finished_one_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, out = recipe(tmp_path, HEAD + GRID), tmp_path / "out"
    given = [str(path), "--out", str(out), "--only", "snvint*seed1"]
    (name,) = (one.name for one in plan(load_experiment(path), ["snvint*seed1"]))
    folder = RunFolder(out / name)
    with subprocess.Popen([sys.executable, "-m", "analysis.experiments.run", *given], cwd=ROOT) as process:
        while not list(folder.path.glob("checkpoints/checkpoint_last.pt")) and process.poll() is None:
            time.sleep(0.02)
        with folder.locked() as lock:
            assert lock is None  # its process has it: a second command leaves the run alone
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert folder.results is None
    (one,) = plan(load_experiment(path), ["snvint*seed1"])
    assert folder.done(one) < 1

    assert run.main(given) == 0
    said = capsys.readouterr().out
    assert f"start  {name}" in said
    assert f"done   {name}: BLEU " in said
    assert "Loaded checkpoint" in (folder.path / "train.log").read_text()
    history = json.loads((folder.path / "checkpoints" / "dsq_history.json").read_text())
    assert [level["updates"] for level in history["levels"]] == [15, 15]

    (entered,) = read_ledger(out / "ledger.csv")
    assert (entered["run"], entered["format"], entered["box"], entered["sessions"]) == (name, "snvint", "16", "2")
    assert entered["level_updates"] == "15 15"
    assert 0.0148 < float(entered["arithmetic"]) < 0.0983
    assert len(entered["stash_bytes"].split()) == 2
    told = ("commit", "versions", "cpu", "best_valid_loss", "training", "text_sha256")
    assert all(entered[column] for column in told)
    assert entered["seconds"] == ""  # of the last session alone

    before = (out / "ledger.csv").read_bytes()
    assert run.main(given) == 0
    assert "1 of 1 runs were finished before" in capsys.readouterr().out
    assert (out / "ledger.csv").read_bytes() == before

    changed = recipe(tmp_path, HEAD.replace("max-tokens = 512", "max-tokens = 500") + GRID)
    assert run.main([str(changed), *given[1:]]) == 2
    assert f"{folder.path}: its run was made with training" in capsys.readouterr().err
    assert report.main([str(out / "ledger.csv")]) == 0
    assert "| [2,2,2,16] [16,4,4,16] |" in (out / "report.md").read_text()


def test_what_is_told_of_a_run_is_its_recipes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    experiment = load_experiment(recipe(tmp_path, HEAD + "[[runs]]"))
    (one,), engine = plan(experiment), pytest.fail
    session = run.Session(experiment, [one], tmp_path, engine, threads=1)
    folder = session.folders[one.name]
    folder.start(one, experiment.data, {"cpu": "x"})
    (folder.path / "results.json").write_text('{"bleu": 2.5, "valid_loss": [], "seconds": {"total": 9}}')
    add_row(tmp_path / "ledger.csv", {"recipe": "other", "run": one.name, "score": 99, "measure": "BLEU"})

    class Ended:
        def status(self) -> int:
            return 0

    assert session._ended(run.StartedRun(one, folder, Ended()))
    assert "fp32_seed1: BLEU 2.5, " in capsys.readouterr().out
    assert [row["seconds"] for row in read_ledger(tmp_path / "ledger.csv")] == ["", "9"]


def test_the_plan_is_printed_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture, caplog) -> None:
    path = recipe(tmp_path, HEAD + GRID)
    assert run.main([str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "bfp_2-2-2-16_16-4-4-16_at0.5_seed2" in said
    assert "6 runs." in said
    assert caplog.messages == []  # each run's own log warns of its levels
    assert not (tmp_path / "out").exists()


def test_a_setting_that_came_later_counts_as_its_default() -> None:
    data = Data(kind="generated", vocab=99)
    recorded = data_folder.settings(data)
    del recorded["pretrained"]
    assert data_folder.same(recorded, data)
    assert not data_folder.same(recorded, Data(kind="generated", vocab=98))
