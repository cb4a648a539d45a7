"""A user's mistake: one line that names the flag and the accepted form, exit status 2, nothing written over."""

import dataclasses
from pathlib import Path

import pytest

from dsq import DSQConfig
from fairseq_plugin import flags
from tests.fairseq_plugin.harness import LEVELS, MODEL, contents, refusal, run, updates


def test_checkpoint_of_another_architecture(capsys, data: Path, trained: Path) -> None:
    before = contents(trained)
    given = ["--encoder-ffn-embed-dim", 32, "--save-dir", trained, "--dsq-levels", LEVELS, "--max-update", 3]
    said = refusal(capsys, "train", data, *MODEL, *given)
    assert "the checkpoint is of another architecture" in said
    assert "encoder.layers.0.fc1.weight" in said
    assert contents(trained) == before


def test_a_fraction_of_epochs_over_several_folders(capsys, data: Path, tmp_path: Path) -> None:
    # a run that was resumed in the second folder took the epochs for as long as those of the second
    given = [f"{data}:{data}", *MODEL, "--dsq-levels", LEVELS, "--dsq-rise-at", 0.5, "--save-dir", tmp_path]
    expected = "with data in several folders, whose epochs differ, give --max-update"
    assert expected in refusal(capsys, "train", *given, "--max-epoch", 1)
    run("train", *given, "--max-epoch", 1, "--max-update", 2, "--disable-validation")
    assert updates(tmp_path) == [1, 1]


def test_a_flag_without_levels_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert flags.config_of(flags.DSQFlags(dsq_box=32)) is None
    assert "without --dsq-levels there is no DSQ: --dsq-box does nothing" in caplog.text


def test_help_documents_every_flag(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("train", "--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in {field.name for field in dataclasses.fields(DSQConfig)} - {"adapters"} | {"reset"}:
        assert f"  --dsq-{option.replace('_', '-')}" in text
