"""Two checkouts side by side: a process that runs on another tree's dsq, and the table of times."""

from pathlib import Path

import pytest

from analysis.revisions import against
from analysis.revisions.other_tree import run_in


def test_a_module_runs_on_the_dsq_of_the_tree_that_is_named(tmp_path: Path) -> None:
    """A dsq of another tree: its one file says so, and the module is still found in this tree."""
    (tmp_path / "dsq").mkdir()
    (tmp_path / "dsq" / "__init__.py").write_text("print('the other dsq')")
    module = tmp_path / "shown.py"
    module.write_text("def main(arguments): print(*arguments)")
    assert run_in(tmp_path, "shown", "a", "b") == "the other dsq\na b\n"
    with pytest.raises(RuntimeError, match=r"No module named 'analysis\.absent'"):
        run_in(tmp_path, "analysis.absent")


def test_what_is_slower_is_marked_and_noise_stands_beside_it() -> None:
    old, again = [{"a": 1.0, "b": 2.0}, {"a": 1.1, "b": 2.0}], [{"a": 1.0, "b": 2.2}, {"a": 1.1, "b": 2.0}]
    new = [{"a": 1.2, "b": 2.0}, {"a": 1.21, "b": 2.0}]
    lines = against.report(new, old, again).splitlines()
    a, b = (next(line for line in lines if line.startswith(f"{name} ")) for name in "ab")
    assert a.split() == ["a", "1050.000", "1205.000", "1.150", "1.100-1.200", "1.000", "1.000-1.000", "slower"]
    assert b.split()[-2:] == ["1.050", "1.000-1.100"]
    assert lines[-1].startswith("1 of 2 ratios above 1.03; 2 rounds")
