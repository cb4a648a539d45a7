"""What a user gets wrong: one line that names the flag and the accepted form, exit status 2, nothing written over."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from dsq import DSQConfig
from fairseq_plugin import flags
from tests.fairseq_plugin.harness import LEVELS, MODEL, run, sentence_pairs, write_pairs


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run("train", data, *MODEL, "--max-update", 1, "--save-dir", folder, "--dsq-levels", LEVELS)
    return folder


def refusal(capsys: pytest.CaptureFixture, command: str, *arguments: object) -> str:
    """The one line of standard error with which the command refuses."""
    with pytest.raises(SystemExit) as exit_:
        run(command, *arguments)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " | INFO | " not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"dsq-{command}: error: ")
    return lines[0]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


PRECISION = "as in [16,4,4,16]"
CHOICE = "must be one of "
NUMBER = "must be a whole number"


@pytest.mark.parametrize(
    ("flag", "given", "accepted"),
    [
        ("--dsq-levels", "[2,2]", PRECISION),
        ("--dsq-levels", "[2,2,2,0]", PRECISION),
        ("--dsq-levels", "[a,b,c,d]", PRECISION),
        ("--dsq-levels", "[4,4,4,16] [2,2,2,16]", "never decrease, as in [2,2,2,16] [16,4,4,16]"),
        ("--dsq-format", "float", CHOICE + "bfp, fixed"),
        ("--dsq-rounding", "up", CHOICE + "nearest, stochastic"),
        ("--dsq-box-axis", "first", CHOICE + "contraction, last"),
        ("--dsq-box", "x", NUMBER),
        ("--dsq-box", "0", NUMBER),
        ("--dsq-fraction-bits", "x", NUMBER),
        ("--dsq-patience", "0", NUMBER),
        ("--dsq-threshold", "x", "must be a number"),
        ("--dsq-threshold", "1", "threshold must be a relative improvement of at least 0 and below 1"),
        ("--dsq-exclude", "(", "must be a regular expression"),
    ],
)
def test_malformed_flag(capsys, data: Path, tmp_path: Path, flag: str, given: str, accepted: str) -> None:
    said = refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path / "run", flag, given)
    assert said.startswith(f"dsq-train: error: argument {flag}: ")
    assert accepted in said
    assert not (tmp_path / "run").exists()


def test_flags_that_contradict_each_other(capsys, data: Path, tmp_path: Path) -> None:
    given = ["--dsq-levels", LEVELS, "--dsq-fraction-bits", 4]
    said = refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path / "run", *given)
    assert "--dsq-fraction-bits goes with format='fixed'" in said


def test_missing_data(capsys, tmp_path: Path, trained: Path) -> None:
    expected = f"data: {tmp_path / 'none'} does not exist: give a directory that dsq-preprocess wrote"
    assert expected in refusal(capsys, "train", tmp_path / "none", *MODEL, "--save-dir", tmp_path / "run")
    assert expected in refusal(capsys, "generate", tmp_path / "none", "--path", trained / "checkpoint_last.pt")


def test_missing_subset(capsys, data: Path, tmp_path: Path) -> None:
    said = refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path, "--valid-subset", "dev")
    assert "data: Dataset not found: dev" in said
    assert "give a directory that dsq-preprocess wrote" in said


def test_save_dir_that_is_a_file(capsys, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    said = refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path / "run")
    assert f"--save-dir or --destdir: {tmp_path / 'run'}" in said
    assert "cannot be written to" in said
    assert (tmp_path / "run").read_text() == "mine"


def test_output_where_no_folder_can_be_made(capsys, data: Path, tmp_path: Path) -> None:
    expected = "--save-dir or --destdir: /proc/none"
    assert f"{expected}/run cannot be" in refusal(capsys, "train", data, *MODEL, "--save-dir", "/proc/none/run")
    write_pairs(tmp_path / "train", sentence_pairs(3, 0))
    given = ["-s", "de", "-t", "xx", "--trainpref", tmp_path / "train", "--destdir", "/proc/none"]
    assert f"{expected} cannot be" in refusal(capsys, "preprocess", *given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--share-all-embeddings", "--encoder-embed-dim", 40], "requires a joined dictionary"),
        (["--encoder-attention-heads", 3], "embed_dim must be divisible by num_heads"),
    ],
)
def test_sizes_that_no_model_can_have(capsys, data: Path, tmp_path: Path, given: list[object], why: str) -> None:
    said = refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path, *given)
    assert "the flags of --arch, such as its sizes: " in said
    assert why in said


@pytest.mark.parametrize("content", [b"", b"hello, this is text\n", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_checkpoint(capsys, data: Path, tmp_path: Path, content: bytes) -> None:
    junk = tmp_path / "junk.pt"
    junk.write_bytes(content)
    expected = f"checkpoint {junk} cannot be read"
    assert expected in refusal(capsys, "train", data, *MODEL, "--save-dir", tmp_path, "--restore-file", junk)
    assert expected in refusal(capsys, "generate", data, "--path", junk)


def test_missing_checkpoint(capsys, data: Path, tmp_path: Path) -> None:
    said = refusal(capsys, "generate", data, "--path", tmp_path / "none.pt")
    assert f"--path: {tmp_path / 'none.pt'} does not exist: give a checkpoint that dsq-train wrote" in said


def test_missing_text(capsys, tmp_path: Path) -> None:
    given = ["-s", "de", "-t", "xx", "--trainpref", tmp_path / "none", "--destdir", tmp_path / "bin"]
    assert f"{tmp_path / 'none'}.de does not exist" in refusal(capsys, "preprocess", *given)


def test_checkpoint_of_another_architecture(capsys, data: Path, trained: Path) -> None:
    before = contents(trained)
    given = ["--encoder-ffn-embed-dim", 32, "--save-dir", trained, "--dsq-levels", LEVELS, "--max-update", 2]
    said = refusal(capsys, "train", data, *MODEL, *given)
    assert "the checkpoint is of another architecture" in said
    assert "encoder.layers.0.fc1.weight" in said
    assert contents(trained) == before


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--dsq-levels", "[4,4,4,16]"], '--dsq-levels "[4,4,4,16]" differs from the checkpoint\'s "' + LEVELS + '"'),
        (["--dsq-levels", LEVELS, "--dsq-box", 32], "--dsq-box 32 differs from the checkpoint's 16"),
        (["--dsq-levels", LEVELS, "--dsq-format", "bfp"], "--dsq-format 'bfp' differs from the checkpoint's 'snvint'"),
        ([], f'--dsq-levels is absent, but the checkpoint was trained with --dsq-levels "{LEVELS}"'),
    ],
)
def test_resuming_with_other_flags(capsys, data: Path, trained: Path, given: list[str], line: str) -> None:
    before = contents(trained)
    assert line in refusal(capsys, "train", data, *MODEL, "--save-dir", trained, "--max-update", 2, *given)
    assert contents(trained) == before


def test_reset_starts_at_the_first_level(data: Path, trained: Path, tmp_path: Path) -> None:
    given = ["--restore-file", trained / "checkpoint_last.pt", "--dsq-levels", "[4,4,4,16]", "--dsq-reset"]
    run("train", data, *MODEL, "--save-dir", tmp_path, "--max-update", 2, *given)
    (level,) = json.loads((tmp_path / "dsq_history.json").read_text())["levels"]
    assert (level["precision"], level["updates"]) == ([4, 4, 4, 16], 1)  # of the two updates, one was the other run's


def test_low_q3_warns_once(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn) -> None:
    given = [
        "--max-update",
        1,
        "--no-save",
        "--disable-validation",
        "--dsq-levels",
        "[2,2,2,8]",
        "--dsq-format",
        "fixed",
    ]
    run("train", data, *MODEL, "--save-dir", tmp_path, *given)
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    assert len([line for line in said if "Appendix C" in line]) == 1


def test_a_flag_without_levels_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert flags.config_of(flags.DSQFlags(dsq_box=32)) is None
    assert "without --dsq-levels there is no DSQ: --dsq-box does nothing" in caplog.text


def test_every_option_of_the_core_has_a_flag() -> None:
    options = {field.name for field in dataclasses.fields(DSQConfig)} - {"adapters"}  # fairseq has none
    assert {option.name.removeprefix("dsq_") for option in flags.FLAGS} == options | {"reset"}


def test_help_documents_every_flag(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("train", "--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in flags.FLAGS:
        assert f"  {flags.flag_of(option.name)}" in text
