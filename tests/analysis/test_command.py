"""An --out that cannot be written to is refused in one line, before anything is measured."""

from pathlib import Path

import pytest

from analysis import compare_stash, gpu_check
from analysis.bench import __main__ as bench
from analysis.command import make_folder, refuse_used


@pytest.mark.parametrize(
    "main, arguments",
    [
        (compare_stash.main, ["--only", "plain"]),
        (bench.main, ["kernels"]),
        (bench.main, ["stash"]),
        (gpu_check.main, []),
    ],
)
@pytest.mark.parametrize("place", ["file", "file/run", "/proc/run"])
def test_out_is_refused_before_any_work(main, arguments, place, tmp_path, capsys):
    if main is gpu_check.main:
        pytest.importorskip("triton")
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place
    assert main([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert f"error: --out {out}: " in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_there_may_be_gone_on_with_but_not_taken_for_new(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    make_folder(tmp_path / "a")
    refuse_used(tmp_path / "a" / "b")
    with pytest.raises(ValueError, match=r"--out .*/a: there already; give a new or empty directory$"):
        refuse_used(tmp_path / "a")
