"""A mistake ends in one line and exit status 2; files appear whole or not at all; records as tables."""

import math
import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import make_folder
from dsq import command


def test_a_regular_file_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "a.csv"
    command.write_text(out, "old ü")
    out.chmod(0o640)

    def half(file):
        assert file.suffix == ".csv"
        file.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        command.write_whole(out, half)
    assert out.read_text(encoding="utf-8") == "old ü"
    command.write_text(out, "new")
    assert out.read_text() == "new"
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "real" / "there.txt")
    for text in ("made", "replaced"):
        command.check_writable(link)
        command.write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "real" / "there.txt").read_text() == text


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    for path, reason in [
        *((path, "it is no regular file") for path in (tmp_path / "fifo", "/dev/null")),
        ("/dev/stdout", "it is no regular file"),  # it may lead to a file that has more in it
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / "file" / "x", "there is no folder"),
        ("/proc/x", "cannot be written"),
    ]:
        with pytest.raises(ValueError, match=rf"^output {path} .*{reason}"):
            command.check_writable(path)
        with pytest.raises(ValueError, match=rf"^output {path} (cannot be written: |is a folder)"):
            command.write_text(path, "")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_there_may_be_gone_on_with(tmp_path):
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    make_folder(tmp_path / "a")
    with pytest.raises(ValueError, match=r"--out /proc/run: .*; give a directory that can be written to$"):
        make_folder(type(tmp_path)("/proc/run"))


@pytest.mark.parametrize("error", [ValueError("--out x:\nthere already"), OSError("--out x: there already")])
def test_guarded_turns_mistakes_into_one_line(error, capsys):
    def work():
        raise error

    assert command.guarded("tool", work) == 2
    assert capsys.readouterr().err == "tool: error: --out x: there already\n"
    assert command.guarded("tool", lambda: None) == 0
    with pytest.raises(KeyError):  # a fault of ours
        command.guarded("tool", lambda: {}["missing"])


def test_nothing_of_a_name_acts_on_the_terminal(capsys):
    def work():
        raise ValueError("model \x1b]0;t\x07\x9b31m\u202e\ud800 é 模")

    command.guarded("tool", work)
    assert capsys.readouterr().err == "tool: error: model \\x1b]0;t\\x07\\x9b31m\\u202e\\ud800 é 模\n"


def test_a_reader_that_has_gone_ends_the_command_quietly():
    code = "from dsq.command import guarded; raise SystemExit(guarded('t', lambda: print('y' * 2**20)))"
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert (child.wait(), child.stderr.read()) == (0, b"")


CPUINFO = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\nstepping\t: 8\n\n"
CPUINFO += "processor\t: 1\nmodel name\t: another\n"


def test_the_processor_is_that_of_the_first_core_and_has_a_name_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: CPUINFO)
    assert command.processor.__wrapped__() == "Xeon 6 143 8"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "CPU implementer : 0x41\n")
    assert command.processor.__wrapped__() == (platform.processor() or platform.machine())


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("x.json", b"[" * 100_000, "is nested too deeply to be read"),
        ("x.json", b"1" * 5000, "is not JSON: Exceeds the limit"),
        ("x.json", b"\xff", "is not text: invalid start byte at byte 0"),
        ("x.json", b'{"a": 1', "is not JSON: "),
        ("x.toml", b"a = " + b"[" * 4000, "is nested too deeply to be read"),
        ("x.toml", b"a = -inf", "is not TOML: numbers must be finite, got -inf"),
        ("x.toml", b"= [", "is not TOML: Invalid statement"),
        ("x.toml", b"a." * 20_000 + b"a = 1", "is not TOML: line 1 has more than 1,000 dots"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} {line}")):
        (command.read_json if name.endswith("json") else command.read_toml)(path)


def test_an_input_that_is_no_regular_file_or_too_large_is_refused(tmp_path: Path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("four")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match=r"regular files|Is a directory"):
            command.read_text(path)
    monkeypatch.setattr(command, "MAX_BYTES", 3)
    with pytest.raises(ValueError, match=r"large is larger than 3 bytes"):
        command.read_text(tmp_path / "large")
    with pytest.raises(ValueError, match=r"absent cannot be read: No such file"):
        command.read_text(tmp_path / "absent")


RECORDS = [{"name": "a", "stash_MiB": 1.25, "note": None, "n": 1}, {"name": "bc", "stash_MiB": math.nan, "n": 1000}]


def test_a_table_has_the_columns_that_are_chosen():
    assert command.table(RECORDS, {"name": "", "stash_MiB": ".1f", "n": ",", "other": ".2f"}) == (
        "name      stash MiB      n    other\n"
        "------  -----------  -----  -------\n"
        "a               1.2      1        -\n"
        "bc                -  1,000        -"
    )
    assert command.table([], {"name": ""}).splitlines()[0].strip() == "name"
    assert command.table([]) == ""


def test_csv_has_every_field_of_any_record():
    assert command.as_csv([{"a": 'x,"', "b": 1 / 3}, {"b": math.nan, "c": True, "a": None}], ".3g") == (
        'a,b,c\n"x,""",0.333,\n,,True\n'
    )
