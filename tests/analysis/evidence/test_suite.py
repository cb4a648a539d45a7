"""suite.toml gives tasks, settings, and the runs of a tier."""

from pathlib import Path

import pytest

from analysis.evidence.suite import FP32, SEEDS, SUITE, load_suite, locate


@pytest.mark.parametrize(("name", "tasks"), [("suite", 12), ("paper", 3)])
def test_every_tier_names_tasks_and_settings_of_the_suite_and_pairs_them_with_fp32(name: str, tasks: int) -> None:
    suite = load_suite(SUITE.with_name(f"{name}.toml"))
    for tier in range(len(suite.tiers)):
        keys = {run.key for run in suite.runs(tier)}
        assert keys == {(task, setting, seed) for task, setting, _ in keys for seed in SEEDS}
        assert {(task, FP32, seed) for task, _, seed in keys} <= keys
    assert len({task for task, _, _ in keys}) == len(suite.tasks) >= tasks


def test_tier_1_has_a_task_of_each_kind_beside_tier_0() -> None:
    suite = load_suite()
    below = {run.key for run in suite.runs(0)}
    kinds = {run.task.kind for run in suite.runs(1) if run.setting.stash == "all"}
    assert kinds == {task.kind for task in suite.tasks.values()}
    assert below < {run.key for run in suite.runs(1)}


def test_seeds_come_one_after_another() -> None:
    seeds = [run.seed for run in load_suite().runs(2)]
    assert seeds == sorted(seeds)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [("mesa = {} }", "mesa = { decay = 0.8 } }", {"mesa"}), ("Debian's package", "The package", set())],
)
def test_a_changed_setting_changes_the_definition_of_its_runs_alone(tmp_path: Path, old, new, changed) -> None:
    (tmp_path / "suite.toml").write_text(SUITE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    before, after = (load_suite(path).definitions for path in (SUITE, tmp_path / "suite.toml"))
    assert {setting for task, setting in before if before[task, setting] != after[task, setting]} == changed


def test_data_may_lie_in_any_of_several_folders(tmp_path: Path) -> None:
    task = load_suite().tasks["gcn-cora"]
    (tmp_path / "b" / "graph").mkdir(parents=True)
    (tmp_path / "b" / "graph" / "ind.cora.graph").touch()
    assert locate(task, [tmp_path, tmp_path / "b"]) == [tmp_path / "b" / "graph" / "ind.cora.graph"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "graph"', 'kind = "graf"', "gcn-cora: kind 'graf' is none of translation"),
        ("rise_at = 0.5", "rises_at = 0.5", "rises_at"),
    ],
)
def test_a_suite_that_means_nothing_is_refused_with_its_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(SUITE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"suite\.toml: .*{message}"):
        load_suite(path)
