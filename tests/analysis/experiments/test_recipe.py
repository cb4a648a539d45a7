"""Recipes: what they may say, the plan and its costs."""

import shlex
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis import ROOT
from analysis.experiments import recipe as recipe_module
from analysis.experiments import run
from analysis.experiments.ledger import read_ledger
from analysis.experiments.recipe import check, load_experiment, plan
from tests.analysis.experiments.tiny import GRID, HEAD, recipe

RECIPES = sorted(recipe_module.RECIPES.glob("*.toml"))
#: finetuned.csv is of recipes that went with their trainer
LEDGERS = sorted(
    path
    for path in (ROOT / "analysis" / "results").glob("*.csv")
    if path.read_text().startswith("recipe,") and path.stem != "finetuned"
)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("title = 3", "title must be a text, got 3"),
        ('titel = "x"', "titel is no key here; accepted are title, data"),
        ('[data]\nkind = "web"', "data.kind must be one of parallel, got 'web'"),
        ('[data]\nkind = "parallel"', "data.path must be given"),
        (
            '[data]\nkind = "parallel"\npath = "x"\nvocab = "many"',
            "data.vocab must be a whole number from 1, got 'many'",
        ),
        ('[data]\nkind = "parallel"\npath = "x"\nbeam = 0', "data.beam must be a whole number from 1, got 0"),
        (HEAD, "runs must be tables headed [[runs]]"),
        (HEAD + "[[runs]]\nbits = 4", "runs[0].bits is no key here; accepted are seed, levels, format"),
        (HEAD + "[[runs]]\nlevels = 4", "runs[0].levels must be a text, got 4"),
        (HEAD + "[[runs]]\nbox = []", "runs[0].box must be a value, or a list of values"),
        (HEAD + '[[runs]]\npaper = "high"', "runs[0].paper must be a number"),
        (HEAD + "[[runs]]\n[runs.training]\nlr = 1.0", "runs[0].training is no key here"),
        (HEAD + "[options]\nseed = [-1]\n[[runs]]", "options.seed must be a whole number from 0, got -1"),
        (HEAD + "seed = 3\n[[runs]]", "training.seed: seeds and DSQ's options go under"),
        ("[data\n", "Expected ']'"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(text: str, named: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        load_experiment(path)
    assert str(raised.value).startswith(str(path))
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
        ("[[runs]]", ["--only", "sbfp*"], "--only sbfp*: matches no run; the first is fp32_seed1"),
        ("[[runs]]", ["--only", "fp32*", "--only", "snvnt*"], "--only snvnt*: matches no run; the first is fp32_seed1"),
        (
            '[[runs]]\nlevels = "[4,4,4,8]"\nformat = "bfp"\nexclude = ["fc(1|2)", "fc[1-2]"]',
            [],
            "runs: two of them are bfp_4-4-4-8_exclude=fc-1-2-_seed1, of {'levels': '[4,4,4,8]', 'format'",
        ),
        ("[[runs]]", ["--set", 'training.save-dir="x"'], "--save-dir: the recipe relies on its own choice"),
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
def test_every_recipe_has_a_plan_with_costs_and_flags_that_dsq_train_takes(path: Path) -> None:
    experiment = load_experiment(path)
    runs = plan(experiment)
    costed = [one for one in runs if one.level_costs(experiment.workload)]
    assert {one.levels for one in runs if one not in costed} == {"none"}
    check(experiment, [runs[0], runs[-1]])


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.stem)
def test_every_row_of_a_committed_ledger_is_in_its_recipe(path: Path) -> None:
    rows = read_ledger(path)
    planned = {
        (recipe, one.name): shlex.join(one.flags)
        for recipe in {row["recipe"] for row in rows}
        for one in plan(load_experiment(recipe_module.RECIPES / f"{recipe}.toml"))
    }
    assert {(row["recipe"], row["run"]): row["training"] for row in rows}.items() <= planned.items()


def test_absent_data_say_where_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = [str(recipe_module.RECIPES / "wmt14_table6.toml"), "--out", str(tmp_path / "out"), "--only", "fp32*"]
    assert run.main([*given, "--data", str(tmp_path / "no")]) == 2
    said = capsys.readouterr().err
    assert f"data.path {tmp_path / 'no'}: there is no such folder; give --data DIR. train, newstest2013" in said


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
