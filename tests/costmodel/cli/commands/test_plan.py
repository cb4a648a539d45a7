"""dsq-cost plan: what it finds, draws and refuses."""

import json

from costmodel.cli.main import main

OPT = ["plan", "--workload", "opt_1.3b", "--fused-attention"]


def answer(capsys, *arguments):
    assert main([*OPT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_picture_of_a_precision(capsys, tmp_path):
    path = tmp_path / "memory.png"
    answer(capsys, "bfp:[2,2,2,16]", "--hardware", "h100", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
