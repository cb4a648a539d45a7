"""A mistake ends in one line and exit status 2."""

import subprocess
import sys

import pytest

from dsq.command.parser import OneLineParser, fail, guarded


def test_a_wrong_flag_is_one_line_and_status_2(capsys):
    parser = OneLineParser(prog="tool")
    parser.add_subparsers(dest="command").add_parser("run").add_argument("--steps", type=int)
    for arguments, said in [
        (["run", "--steps", "x"], "tool run: error: argument --steps: invalid int value: 'x'\n"),
        (["--no"], "tool: error: unrecognized arguments: --no\n"),
    ]:
        with pytest.raises(SystemExit) as left:
            parser.parse_args(arguments)
        assert left.value.code == 2
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [ValueError("--out x:\nthere already"), OSError("--out x: there already")])
def test_guarded_turns_mistakes_into_one_line(error, capsys):
    def work():
        raise error

    assert guarded("tool", work) == 2
    assert capsys.readouterr().err == "tool: error: --out x: there already\n"
    assert guarded("tool", lambda: None) == 0


def test_a_standard_output_that_was_closed_is_no_fault(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert guarded("tool", lambda: sys.stdout.write("said to nobody")) == 0


def test_guarded_leaves_faults_of_ours_alone():
    with pytest.raises(KeyError):
        guarded("tool", lambda: {}["missing"])


def test_fail(capsys):
    with pytest.raises(SystemExit) as left:
        fail("tool", "no")
    assert (left.value.code, capsys.readouterr().err) == (2, "tool: error: no\n")


def test_a_reader_that_has_gone_ends_the_command_quietly():
    code = "from dsq.command.parser import guarded; raise SystemExit(guarded('t', lambda: print('y' * 2**20)))"
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert (child.wait(), child.stderr.read()) == (0, b"")


def test_nothing_heavy_is_imported():
    code = "import sys, types; sys.modules['dsq'] = types.ModuleType('dsq'); sys.modules['dsq'].__path__ = ['dsq']\n"
    code += "import dsq.command.parser, dsq.command.files, dsq.command.table\n"
    code += "print({'torch', 'numpy', 'pandas', 'tabulate'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
