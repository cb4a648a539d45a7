"""Recipes: what they may say, the plan and its costs, going on after a kill, the ledger and the report."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.experiments import data_folder, glue, pareto_picture, report, run
from analysis.experiments.experiment import Data, load_experiment
from analysis.experiments.fairseq_run import ROOT
from analysis.experiments.labelled import read_labelled
from analysis.experiments.ledger import add_row, read_ledger
from analysis.experiments.plan import PlannedRun, plan, rises
from analysis.experiments.plan_costs import Cost, expected, level_costs, weighed
from analysis.experiments.run_folder import RunFolder

RECIPES = sorted((Path(run.__file__).parent / "recipes").glob("*.toml"))
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


def planned(levels: str, max_update: int = 100, **options: float | str) -> PlannedRun:
    return PlannedRun("x", "", None, {"levels": levels, "format": "bfp", **options}, 1, {"max-update": max_update})


# ---- the recipe ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("title = 3", "title must be a text, got 3"),
        ('titel = "x"', "titel is no key here; accepted are title, data"),
        ('[data]\nkind = "web"', "data.kind must be one of generated, parallel, labelled, got 'web'"),
        ('[data]\nkind = "parallel"', "data.path must be given for data.kind = 'parallel'"),
        ('[data]\nkind = "generated"\nvocab = "many"', "data.vocab must be a whole number, got 'many'"),
        ('[data]\nkind = "generated"\nbeam = 0', "data.beam must be a whole number from 1, got 0"),
        (HEAD, "runs must be tables headed [[runs]]"),
        (HEAD + "[[runs]]\nbits = 4", "runs[0].bits is no key here; accepted are seed, levels, format"),
        (HEAD + "[[runs]]\nbox = []", "runs[0].box must be a value, or a list of values"),
        (HEAD + '[[runs]]\npaper = "high"', "runs[0].paper must be a number"),
        (HEAD + "[[runs]]\n[runs.training]\nlr = 1.0", "runs[0].label must be given"),
        (HEAD + "[options]\nseed = [-1]\n[[runs]]", "options.seed must be whole numbers from 0, got -1"),
        (HEAD + "seed = 3\n[[runs]]", "training.seed: seeds and DSQ's options go under"),
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
        ('[[runs]]\nlevels = "[2,2]"', [], "run bfp_2-2_seed1: argument --dsq-levels: precision must be"),
        ("[[runs]]\n[[runs]]", [], "runs: two of them are fp32_seed1"),
        ("[[runs]]", ["--only", "sbfp*"], "--only sbfp*: matches no run; the first is fp32_seed1"),
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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_with_costs(path: Path) -> None:
    experiment = load_experiment(path)
    runs = plan(experiment)
    costed = [one for one in runs if expected(one, experiment.workload)]
    assert {one.levels for one in runs if one not in costed} == {"none"}


def test_absent_data_say_where_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (wmt,) = (path for path in RECIPES if path.stem == "wmt14_table6")
    given = [str(wmt), "--out", str(tmp_path / "out"), "--only", "fp32*"]
    assert run.main([*given, "--data", str(tmp_path / "no")]) == 2
    assert f"data.path {tmp_path / 'no'}: there is no such folder; give --data DIR. WMT14" in capsys.readouterr().err
    data = Data(kind="labelled", path=str(tmp_path), task="x", pretrained=str(tmp_path), get="Ask.")
    with pytest.raises(ValueError, match=r"there is no model\.pt\. Ask\."):
        data_folder.check_present(data)


# ---- plan and costs -----------------------------------------------------------------------------------------------


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


def test_a_cost_is_weighed_by_the_moment_of_the_rise() -> None:
    levels = "[2,2,2,16] [16,4,4,16]"
    workload = "transformer_iwslt_de_en"
    low, high = level_costs(planned(levels), workload)
    assert (low.arithmetic, high.arithmetic) == pytest.approx((0.0148, 0.0983), abs=1e-4)
    assert (low.dram, high.dram) == pytest.approx((0.2016, 0.4375), abs=1e-4)
    quarter = Cost(0.25 * low.arithmetic + 0.75 * high.arithmetic, 0.25 * low.dram + 0.75 * high.dram)
    for moment in (0.25, 25, "25", "0.25"):
        assert expected(planned(levels, rise_at=moment), workload) == quarter
    assert expected(planned(levels), workload) == (low, high)
    assert expected(planned("none"), workload) is None
    again = weighed([low, high], [100, 300])
    assert again is not None
    assert (again.arithmetic, again.dram) == pytest.approx((quarter.arithmetic, quarter.dram))


def test_rises_of_a_run_that_epochs_bound() -> None:
    levels = "[2,2,2,16] [4,4,4,16] [16,4,4,16]"
    assert rises(planned(levels, rise_at="0.25 0.5")) == [0.25, 0.5]
    assert rises(planned(levels, max_update=0, rise_at="100 200")) is None
    assert rises(planned("[4,4,4,16]")) == []


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
    assert all(entered[column] for column in ("commit", "versions", "cpu", "seconds", "best_valid_loss", "training"))

    before = (out / "ledger.csv").read_bytes()
    assert run.main(given) == 0
    assert "1 of 1 runs were finished before" in capsys.readouterr().out
    assert (out / "ledger.csv").read_bytes() == before

    changed = recipe(tmp_path, HEAD.replace("max-tokens = 512", "max-tokens = 500") + GRID)
    assert run.main([str(changed), *given[1:]]) == 2
    assert f"{folder.path}: its run was made with training" in capsys.readouterr().err
    assert report.main([str(out / "ledger.csv")]) == 0
    assert "| [2,2,2,16] [16,4,4,16] |" in (out / "report.md").read_text()


def test_the_plan_is_printed_and_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = recipe(tmp_path, HEAD + GRID)
    assert run.main([str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "bfp_2-2-2-16_16-4-4-16_at0.5_seed2" in said
    assert "6 runs." in said
    assert not (tmp_path / "out").exists()


def test_a_setting_that_came_later_counts_as_its_default() -> None:
    data = Data(kind="generated", vocab=99)
    recorded = data_folder.settings(data)
    del recorded["pretrained"]
    assert data_folder.same(recorded, data)
    assert not data_folder.same(recorded, Data(kind="generated", vocab=98))


# ---- ledger and report --------------------------------------------------------------------------------------------


def entry(name: str, score: float, dram: float | None, **more: object) -> dict[str, object]:
    levels = "none" if dram is None else "[4,4,4,16]"
    format = "" if dram is None else name.split("_")[0]
    row = {"recipe": "r", "run": name, "score": score, "measure": "BLEU", "levels": levels, "format": format}
    return {**row, "arithmetic": dram and dram / 9, "dram": dram, "seconds": 60, "best_valid_loss": 2.0, **more}


def test_a_ledger_has_one_row_a_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    for name, score in (("a", 1.5), ("b", 2.5), ("a", 3.5)):
        add_row(path, entry(name, score, 0.3))
    add_row(path, entry("c", 4.5, 0.3, label="later, a column"))
    rows = read_ledger(path)
    assert [(row["run"], row["score"], row["label"]) for row in rows] == [
        ("a", "3.5", ""),
        ("b", "2.5", ""),
        ("c", "4.5", "later, a column"),
    ]
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: is no ledger"):
        read_ledger(tmp_path / "other.csv")


def test_the_report_has_mean_spread_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "ledger.csv"
    for seed, (plain, bfp, snvint) in enumerate(((80, 70, 76), (82, 73, 77)), start=1):
        add_row(path, entry(f"fp32_seed{seed}", plain, None))
        add_row(path, entry(f"bfp_4_seed{seed}", bfp, 0.3, paper_score=71))
        add_row(path, entry(f"snvint_4_seed{seed}", snvint, 0.3))
    assert report.main([str(path), "--out", str(tmp_path / "there")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (bfp,) = (line.split() for line in lines if " bfp " in f" {line} ")
    assert bfp == ["[4,4,4,16]", "bfp", "2", "71.5", "3.0", "-9.5", "71.00", "2.000", "0.0333", "0.3000", "1.0"]
    assert (tmp_path / "there" / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "![cost against BLEU](r.png)" in (tmp_path / "there" / "report.md").read_text()


def test_the_front_is_what_nothing_beats() -> None:
    points = [(0.3, 70.0), (0.3, 75.0), (0.4, 74.0), (0.5, 80.0), (0.2, 60.0)]
    assert pareto_picture.front(points) == [(0.2, 60.0), (0.3, 75.0), (0.5, 80.0)]


# ---- GLUE's own files and RoBERTa's own subwords ------------------------------------------------------------------


def test_reads_glue_as_it_unpacks(tmp_path: Path) -> None:
    for task in ("MNLI", "QNLI"):
        (tmp_path / task).mkdir()
    (tmp_path / "MNLI" / "dev_matched.tsv").write_text(
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tx\ty\n"
    )
    (tmp_path / "QNLI" / "train.tsv").write_text("index\tquestion\tsentence\tlabel\n0\twho\thim\tentailment\n")
    assert read_labelled(tmp_path, "mnli", "dev").inputs == [["a"], ["b"]]
    assert read_labelled(tmp_path, "mnli", "dev").labels == ["y"]
    assert read_labelled(tmp_path, "qnli", "train").inputs == [["who"], ["him"]]


def test_fine_tunes_a_roberta_with_its_own_subwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full-size recipe does, up to the training itself."""
    weights, trained = tmp_path / "roberta", []
    weights.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz\u0120"  # GPT-2 writes a space as this letter
    (weights / "encoder.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (weights / "vocab.bpe").write_text("#version: 0.2\n\n")
    (weights / "dict.txt").write_text("".join(f"{n} 1\n" for n in range(len(letters))))
    for split in ("train", "dev"):
        (tmp_path / f"toy.{split}.tsv").write_text("label\tsentence\n1\tone a\n0\tone b\n")

    def fairseq(command: str, arguments: list[str], log: Path, watch: object = None) -> None:
        trained.extend(arguments if command == "train" else [])
        valid = '{"valid_num_updates": "1", "valid_accuracy": "50", "valid_loss": "1"}'
        log.write_text(f"x | INFO | valid | {valid}\n")

    monkeypatch.setattr(glue, "fairseq", fairseq)
    given = ["--data", str(tmp_path), "--task", "toy", "--out", str(tmp_path / "run"), "--dsq-levels", "none"]
    assert glue.main([*given, "--pretrained", str(weights)]) == 0
    assert trained[trained.index("--finetune-from-model") + 1] == str(weights / "model.pt")
    pieces = tmp_path / "run" / "pieces"
    assert (pieces / "dict.txt").read_text() == (weights / "dict.txt").read_text()
    assert (pieces / "train.input0").read_text() == "14 13 4 26 0\n14 13 4 26 1\n"  # o n e _ a
