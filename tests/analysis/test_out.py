"""An --out that cannot be written to is refused in one line, before anything is measured."""

import pytest

from analysis.bench import __main__ as bench
from analysis.gpu import check
from analysis.stash import compare


@pytest.mark.parametrize(
    "main, arguments",
    [
        (compare.main, ["--only", "plain"]),
        (bench.main, ["kernels"]),
        (bench.main, ["stash"]),
        (check.main, []),
    ],
)
@pytest.mark.parametrize("place", ["file", "file/run", "/proc/run"])
def test_out_is_refused_before_any_work(main, arguments, place, tmp_path, capsys):
    if main is check.main:
        pytest.importorskip("triton")
    (tmp_path / "file").write_text("mine")
    out = tmp_path / place
    assert main([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert f"error: --out {out}: " in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert (tmp_path / "file").read_text() == "mine"
