"""An experiment's runs: one from text to the report through a kill, and how commands share folders."""

import json
import lzma
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis import ROOT
from analysis.experiments import data, demo, report, run
from analysis.experiments.data import Data
from analysis.experiments.ledger import add_row, read_ledger
from analysis.experiments.recipe import load_experiment, plan
from analysis.experiments.run import RunFolder, Session, stop
from tests.analysis.experiments.tiny import GRID, HEAD, recipe
from tests.fairseq_plugin.harness import sentence_pairs, write_pairs


def test_a_killed_run_goes_on_and_a_finished_one_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, out = recipe(tmp_path, HEAD + GRID), tmp_path / "out"
    for seed, (name, count) in enumerate({"train": 60, "valid": 6, "test": 6}.items()):
        write_pairs(tmp_path / name, sentence_pairs(count, seed))
    given = [str(path), "--data", str(tmp_path), "--out", str(out), "--only", "snvint*seed1"]
    (name,) = (one.name for one in plan(load_experiment(path), ["snvint*seed1"]))
    folder = RunFolder(out / name)
    with subprocess.Popen([sys.executable, "-m", "analysis.experiments.run", *given], cwd=ROOT) as process:
        while not list(folder.path.glob("checkpoints/checkpoint_last.pt")) and process.poll() is None:
            time.sleep(0.02)
        with folder.locked() as lock:
            assert lock is None  # its process has it: a second command leaves the run alone
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert folder.read("results") is None

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

    kept = demo.kept(folder.path / "checkpoints" / "checkpoint_best.pt")  # of a model with the linears' stash packed
    assert 10_000 < kept < 1_000_000

    before = (out / "ledger.csv").read_bytes()
    assert run.main(given) == 0
    assert "1 of 1 runs were finished before" in capsys.readouterr().out
    assert (out / "ledger.csv").read_bytes() == before

    changed = recipe(tmp_path, HEAD.replace("max-tokens = 512", "max-tokens = 500") + GRID)
    assert run.main([str(changed), *given[1:]]) == 2
    assert f"{folder.path}: its run was made with flags" in capsys.readouterr().err
    assert report.main([str(out / "ledger.csv")]) == 0
    assert "| [2,2,2,16] [16,4,4,16] |" in (out / "report.md").read_text()


def session(folder: Path) -> tuple[Session, RunFolder]:
    """A session of one run, which has not begun."""
    experiment = load_experiment(recipe(folder, HEAD + "[[runs]]"))
    (one,) = plan(experiment)
    made = Session(experiment, [one], folder, threads=1)
    return made, made.folders[one.name]


def test_what_is_told_of_a_run_is_its_recipes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made, folder = session(tmp_path)
    (one,) = made.runs.values()
    folder.start(one.training_on(made.experiment.data, tmp_path / "data"), {"cpu": "x"})
    (folder.path / "results.json").write_text(
        '{"bleu": 2.5, "signature": "", "valid_loss": [], "seconds": {"train": 9}}'
    )
    other = {"recipe": "other", "run": one.name, "score": 99, "measure": "BLEU", "levels": "", "format": "", "seed": 1}
    add_row(tmp_path / "ledger.csv", other)
    made._ended(one, 0)
    assert "done   fp32_seed1: BLEU 2.5\n" in capsys.readouterr().out
    assert [row["seconds"] for row in read_ledger(tmp_path / "ledger.csv")] == ["", "9"]


def test_a_run_that_another_command_is_at_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made, folder = session(tmp_path)
    with folder.locked():
        made.go(jobs=1)
    assert "another process is at fp32_seed1: call again when it has ended" in capsys.readouterr().out
    assert not folder.log.exists()


def test_a_run_that_another_command_began_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    made, folder = session(tmp_path)
    folder.path.mkdir()
    (folder.path / "run.json").write_text('{"data": {"vocab": 4}}')
    with pytest.raises(ValueError, match=r"its run was made with data {'vocab': 4}, the recipe now says {"):
        made.go(jobs=1)


def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    made, folder = session(tmp_path)  # its data are absent
    with pytest.raises(ValueError, match=r"1 of 1 runs failed, first fp32_seed1: .*--data no such folder: no such"):
        made.go(jobs=1)
    assert folder.failure(-9) == "killed by SIGKILL"


def test_stopping_ends_a_process_that_is_suspended() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    stop(process)
    assert process.returncode == -signal.SIGTERM


# ---- the data that runs share -------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Parallel text; binarising it takes a moment and leaves nothing."""
    monkeypatch.setattr(data, "_binarise", lambda *_: time.sleep(0.05))
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            (folder / f"{split}.{language}").write_text("ja\nnein\n")
    return Data("parallel", str(folder))


def test_commands_that_share_a_folder_prepare_it_once(text: Data, tmp_path: Path, monkeypatch) -> None:
    """Threads here, whose locks differ as processes' do."""
    seen: list[object] = []
    monkeypatch.setattr(data, "_binarise", lambda *given: (time.sleep(0.05), seen.append(given)))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: data.prepare(text, tmp_path / "data"), range(2)))
    assert len(seen) == len(set(found)) == 1


def test_text_may_move_and_be_packed_but_not_change(text: Data, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for path in Path(text.path).iterdir():
        (second / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    for one in (text, Data("parallel", str(second))):
        data.prepare(one, tmp_path / "data")
        record = tmp_path / "data" / "data.json"  # a setting of an older version, in what it prepared, is no other text
        record.write_text(json.dumps(json.loads(record.read_text()) | {"task": ""}))
    with pytest.raises(ValueError, match="was prepared with other settings than the recipe's data"):
        data.prepare(Data("parallel", text.path, vocab=9), tmp_path / "data")
    (Path(text.path) / "test.en").write_text("ja\nno\n")
    with pytest.raises(ValueError, match="was made of other text than --data has now: put that back, or give another"):
        data.prepare(text, tmp_path / "data")


def test_what_a_killed_preparation_left_is_not_taken(text: Data, tmp_path: Path) -> None:
    left = tmp_path / "data" / "binary" / "test.de-en.en.idx"
    left.parent.mkdir(parents=True)
    left.touch()
    data.prepare(text, tmp_path / "data")
    assert not left.exists()
