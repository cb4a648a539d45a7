"""dsq-cost plan: what it finds, draws and refuses."""

import json

import pytest

from costmodel.cli.main import main

OPT = ["plan", "--workload", "opt_1.3b", "--fused-attention"]


def answer(capsys, *arguments):
    assert main([*OPT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gpus_finds_ways_that_fit_the_cheapest_first(capsys):
    found = answer(capsys, "--hardware", "h100", "--fit", "12GB", "--gpus", "4")["plans"]
    assert found
    assert all(record["peak_GB"] <= 12 for record in found)
    costs = [record["device_s/Mtoken"] for record in found]
    assert costs == sorted(costs)
    assert len({record["method"] for record in found}) == len(found)


def test_gpus_says_when_nothing_fits(capsys):
    assert main([*OPT, "--hardware", "h100", "--fit", "1GB", "--gpus", "2"]) == 0
    assert "No way to use 2 devices fits in 1.0 GB" in capsys.readouterr().out


def test_gpus_need_a_link(capsys):
    assert main([*OPT, "--hardware", "laptop-cpu", "--fit", "80GB", "--gpus", "2"]) == 2
    assert "states no link" in capsys.readouterr().err


@pytest.mark.parametrize("idle", [["--zero", "1"], ["--devices", "2"]])
def test_gpus_with_an_option_that_it_searches(capsys, idle):
    assert main([*OPT, "--gpus", "2", *idle]) == 2
    assert "does nothing with --gpus" in capsys.readouterr().err


def test_the_picture_of_a_precision(capsys, tmp_path):
    path = tmp_path / "memory.png"
    answer(capsys, "bfp:[2,2,2,16]", "--hardware", "h100", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
