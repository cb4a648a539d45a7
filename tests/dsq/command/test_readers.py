"""Files that commands read: each kind of damage ends in one line that names the file."""

import os
import re
from pathlib import Path

import pytest

from dsq.command.readers import check_pattern, read_json, read_text, read_toml


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("x.json", b"[1, NaN]", "is not JSON: numbers must be finite, got NaN"),
        ("x.json", b"[1e999]", "is not JSON: numbers must be finite, got 1e999"),
        ("x.json", b"[" * 60 + b"]" * 60, "is nested too deeply to be read"),
        ("x.json", b"[" * 100_000, "is nested too deeply to be read"),
        ("x.json", b"1" * 5000, "is not JSON: Exceeds the limit"),
        ("x.json", b"\xff", "is not text: invalid start byte at byte 0"),
        ("x.toml", b"a = " + b"[" * 4000, "is nested too deeply to be read"),
        ("x.toml", b"a" + b".a" * 20_000 + b" = 1", "is not TOML: a key has more than 50 parts"),
        ("x.toml", b"a = -inf", "is not TOML: numbers must be finite, got -inf"),
        ("x.toml", b"= [", "is not TOML: Invalid statement"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} {line}")):
        (read_json if name.endswith("json") else read_toml)(path)


def test_data_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"a": [1, 2.5, "b.c.d"], "e": null}')
    assert read_json(path) == {"a": [1, 2.5, "b.c.d"], "e": None}
    path.write_text("a.b = [1_0.5, 2]")
    assert read_toml(path) == {"a": {"b": [10.5, 2]}}


def test_what_is_no_regular_file_or_too_large_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("four")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match=r"regular files|Is a directory"):
            read_text(path)
    with pytest.raises(ValueError, match=r"large is larger than 3 bytes"):
        read_text(tmp_path / "large", most=3)
    with pytest.raises(ValueError, match=r"absent cannot be read: No such file"):
        read_text(tmp_path / "absent")


@pytest.mark.parametrize(
    "bad", ["(", "(([a-z0-9_.]+)+)+!", "((a+)b)*", "(a|a)*x", "(a?a?){9,}", ".*.*.*.*.*x", "a" * 1001]
)
def test_patterns_that_can_take_for_ever_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"exclude(:| must)"):
        check_pattern("exclude", bad)


@pytest.mark.parametrize(
    "good", [r"decoder\..*(fc1|fc2)", r"^(?!.*experts).*_proj$", r"layers\.[0-9]+\.", "(?:a.)*b", r"\(\*\+\)"]
)
def test_patterns_that_people_write_are_accepted(good: str) -> None:
    check_pattern("exclude", good)
