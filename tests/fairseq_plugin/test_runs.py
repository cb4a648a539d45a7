"""A mistake, or a run that goes wrong, ends in one line, and nothing that was written is lost."""

import logging
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_plugin import checkpoints, commands
from fairseq_plugin.flags import InputError
from tests.fairseq_plugin.harness import LEVELS, MODEL, contents, levels, refusal, run, start, updates, weights

from fairseq import checkpoint_utils  # isort: skip  # after the plugin's shims
import dataclasses

from dsq import DSQConfig
from fairseq_plugin import flags


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    path, draw = tmp_path / "checkpoint.pt", random.Random(0)
    saved = {"weights": torch.randn(100, generator=torch.Generator().manual_seed(0)), "updates": 7, "name": "x" * 50}
    checkpoints.save(saved, str(path))
    load = checkpoints.checked(lambda file: torch.load(file, weights_only=True))
    whole, refused = path.read_bytes(), 0
    for bit in draw.sample(range(8 * len(whole)), 500):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            loaded = load(str(path))
        except InputError:
            refused += 1
        else:  # a bit of the padding, or of a date
            assert torch.equal(loaded["weights"], saved["weights"])
            assert {**loaded, "weights": None} == {**saved, "weights": None}
    assert refused > 250


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:5000] + bytes(64) + data[5064:]]
)
def test_a_damaged_checkpoint_names_the_last_whole_one(capsys, data: Path, trained: Path, tmp_path, damage) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    os.utime(folder / "checkpoint_1_2.pt")
    output = refusal(capsys, "train", data, *MODEL, "--save-dir", folder, "--dsq-levels", LEVELS)
    assert f"{folder / 'checkpoint_last.pt'} cannot be read: it is damaged" in output
    assert output.endswith(f"the newest whole one beside it is {folder / 'checkpoint_1_2.pt'}")


def test_a_checkpoint_of_a_format_that_is_not_registered(capsys, data: Path, trained: Path, tmp_path: Path) -> None:
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["model"]["dsq._extra_state"]["config"]["levels"] = ["fp5_mine", [16, 4, 4, 16]]
    checkpoints.save(state, str(tmp_path / "checkpoint_last.pt"))
    output = refusal(capsys, "generate", data, "--path", tmp_path / "checkpoint_last.pt", "--cpu")
    assert 'trained with --dsq-levels "fp5_mine [16,4,4,16]": give the --user-dir that registers its formats' in output
    arguments = [data, *MODEL, "--lr", 0, "--max-update", 4, "--save-dir", tmp_path, "--dsq-levels", LEVELS]
    assert "give the --user-dir" in refusal(capsys, "train", *arguments)
    run("train", *arguments, "--dsq-reset")
    assert updates(tmp_path) == [1, 0]


def test_a_full_disk(capsys, data: Path, tmp_path: Path) -> None:
    flags = [data, *MODEL, "--save-interval-updates", 1, "--save-dir", tmp_path, "--dsq-levels", LEVELS]
    run("train", *flags, "--max-update", 1)
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a checkpoint has more
    try:
        output = refusal(capsys, "train", *flags, "--max-update", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "(the file could not be finished): make room, then give the same command again; it goes on from" in output
    after = contents(tmp_path)
    assert all(after[name] == content for name, content in before.items() if name.endswith(".pt"))
    assert not list(tmp_path.glob("*.tmp"))
    run("train", *flags, "--max-update", 2)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, f=function, name=name: (calls.append(name), f(*a)))
    checkpoints.save({}, str(tmp_path / "checkpoint.pt"))
    assert calls == ["fsync", "replace"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_loss_that_is_not_finite(capsys, data: Path, tmp_path: Path) -> None:
    flags = ["--save-interval-updates", 1, "--max-update", 9, "--lr", 1e30, "--save-dir", tmp_path]
    output = refusal(capsys, "train", data, *MODEL, *flags, "--dsq-levels", LEVELS)
    assert "the loss or its gradients are not finite: give a lower --lr" in output
    assert all(map(checkpoints.is_whole, (tmp_path / "crash.pt", tmp_path / "checkpoint_last.pt")))


def test_an_interrupted_run_goes_on_and_one_that_ended_is_left_as_it_is(
    capsys, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [data, *MODEL, "--save-interval-updates", 1, "--max-update", 3, "--save-dir", tmp_path]
    flags += ["--dsq-levels", LEVELS, "--dsq-rise-at", 1]
    save = checkpoints.save

    def interrupted(state: object, filename: str) -> None:
        save(state, filename)
        if filename.endswith("_2.pt"):
            raise KeyboardInterrupt

    monkeypatch.setattr("fairseq.checkpoint_utils.torch_persistent_save", lambda *a, async_write: interrupted(*a))
    with pytest.raises(SystemExit) as exit_:
        run("train", *flags)
    assert exit_.value.code == commands.INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == (
        "dsq-train: stopped; a training goes on from its last checkpoint by the same command"
    )
    monkeypatch.undo()
    run("train", *flags)
    assert torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["optimizer_history"][-1]["num_updates"] == 3
    before = contents(tmp_path)
    run("train", *flags)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        (["--finetune-from-model"], 4),
        (["--reset-optimizer", "--restore-file"], 4),
        (["--dsq-reset", "--restore-file"], 7),  # three were before
    ],
)
def test_a_run_with_dsq_anew_begins_at_the_first_level(data: Path, trained: Path, tmp_path, flags, most) -> None:
    arguments = [data, *MODEL, "--disable-validation", "--save-dir", tmp_path]
    levels = ["--dsq-levels", "[4,4,4,16] [8,4,4,16]", "--dsq-rise-at", 0.5]  # other levels than the checkpoint's
    run("train", *arguments, *flags, trained / "checkpoint_last.pt", "--max-update", most, *levels)
    assert updates(tmp_path) == [2, 2]
    # as fairseq-validate and the Python interface load it: the task has the flags of the training
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])
    assert model.dsq.trained_level == 1
    if flags == ["--finetune-from-model"]:  # the same command again goes on
        run("train", *arguments, *flags, trained / "checkpoint_last.pt", "--max-update", 6, *levels)
        assert updates(tmp_path) == [2, 4]


@pytest.mark.parametrize("flags", [["--finetune-from-model"], ["--dsq-reset", "--restore-file"]])
def test_a_run_without_dsq_from_a_checkpoint_with_it(data: Path, trained: Path, tmp_path: Path, flags) -> None:
    arguments = [*MODEL, "--disable-validation", "--max-update", 4, "--lr", 0, "--save-dir", tmp_path]
    run("train", data, *arguments, *flags, trained / "checkpoint_last.pt")
    before, after = weights(trained), weights(tmp_path)
    assert before.keys() - after.keys() == {"dsq._extra_state"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_an_average_is_of_the_weights_and_interactive_translates_with_it(
    capsys, data: Path, trained: Path, tmp_path: Path
) -> None:
    inputs = [trained / "checkpoint_1_1.pt", trained / "checkpoint_1_2.pt"]
    states = [torch.load(path, weights_only=True) for path in inputs]
    states[0]["model"]["encoder.layers.0.fc1.weight"] += 1
    torch.save(states[0], tmp_path / "other.pt")
    run("average", "--inputs", tmp_path / "other.pt", inputs[1], "--output", tmp_path / "mean.pt")
    mean, last = torch.load(tmp_path / "mean.pt", weights_only=True)["model"], states[1]["model"]
    assert mean.pop("dsq._extra_state") == last.pop("dsq._extra_state")
    torch.testing.assert_close(mean.pop("encoder.layers.0.fc1.weight"), last.pop("encoder.layers.0.fc1.weight") + 0.5)
    assert all(torch.equal(tensor, mean[name]) for name, tensor in last.items())  # --lr 0
    (tmp_path / "text").write_text("hund sieht katze\n")
    flags = ["--path", tmp_path / "mean.pt", "--input", tmp_path / "text", "--beam", 1, "--max-len-b", 3]
    run("interactive", data, *flags, "-s", "de", "-t", "xx", "--cpu")
    assert "\nH-0\t" in capsys.readouterr().out


def test_hydra_train_takes_the_flags_and_eval_lm_the_checkpoint(data: Path, tmp_path: Path, caplog) -> None:
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx"):
        text = "dict.de.txt" if name == "dict.txt" else name.replace(".", ".de-xx.de.")
        (tmp_path / name).symlink_to(data / text)
    process = start(
        *("-m", "fairseq_plugin.commands", "hydra-train", "task=language_modeling", f"task.data={tmp_path}"),
        *('task.dsq_levels="[4,4,4,16]"', "task.tokens_per_sample=32", "model=transformer_lm"),
        "model.decoder_layers=1",
        *("model.decoder_embed_dim=32", "model.decoder_attention_heads=2", "criterion=cross_entropy", "optimizer=adam"),
        *("optimization.lr=[0.001]", "dataset.max_tokens=256", "optimization.max_update=2", "common.cpu=true"),
        *("lr_scheduler=fixed", f"checkpoint.save_dir={tmp_path}/run", "dataset.num_workers=0"),
        *(f"hydra.run.dir={tmp_path}",),
    )
    output = process.communicate()[0]
    assert process.returncode == 0, output
    (level,) = levels(tmp_path / "run")
    assert (level["precision"], level["updates"]) == ([4, 4, 4, 16], 2)
    caplog.set_level(logging.INFO)
    flags = ["--path", tmp_path / "run" / "checkpoint_best.pt", "--gen-subset", "valid", "--max-tokens", 256]
    run("eval_lm", tmp_path, *flags, "--cpu", "--num-workers", 0, "--no-progress-bar")
    assert any("DSQ goes on from a checkpoint of" in line for line in caplog.messages)
    assert any("Perplexity: " in line for line in caplog.messages)


def test_checkpoint_of_another_architecture(capsys, data: Path, trained: Path) -> None:
    before = contents(trained)
    flags = ["--encoder-ffn-embed-dim", 32, "--save-dir", trained, "--dsq-levels", LEVELS, "--max-update", 3]
    output = refusal(capsys, "train", data, *MODEL, *flags)
    assert "the checkpoint is of another architecture" in output
    assert "encoder.layers.0.fc1.weight" in output
    assert contents(trained) == before


def test_a_fraction_of_epochs_over_several_folders(capsys, data: Path, tmp_path: Path) -> None:
    # a run that was resumed in the second folder took the epochs for as long as those of the second
    flags = [f"{data}:{data}", *MODEL, "--dsq-levels", LEVELS, "--dsq-rise-at", 0.5, "--save-dir", tmp_path]
    expected = "with data in several folders, whose epochs differ, give --max-update"
    assert expected in refusal(capsys, "train", *flags, "--max-epoch", 1)
    run("train", *flags, "--max-epoch", 1, "--max-update", 2, "--disable-validation")
    assert updates(tmp_path) == [1, 1]


def test_a_flag_without_levels_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert flags.config_of(flags.DSQFlags(dsq_block_size=32)) is None
    assert "without --dsq-levels there is no DSQ: --dsq-block-size does nothing" in caplog.text


@pytest.mark.parametrize(
    ("levels", "error"),
    [("mxfp5", "--dsq-levels: format must be one of"), ("bf16 [4,4,4,4]", "--dsq-levels must be precisions")],
)
def test_an_error_of_the_levels_names_their_flag(levels: str, error: str) -> None:
    with pytest.raises(flags.InputError, match=f"^{error}"):
        flags.config_of(flags.DSQFlags(dsq_levels=levels))


def test_help_documents_every_flag(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("train", "--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in {field.name for field in dataclasses.fields(DSQConfig)} - {"adapters"} | {"reset"}:
        assert f"  --dsq-{option.replace('_', '-')}" in text
