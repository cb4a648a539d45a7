"""The questions that docs/cost-model.md begins with: its commands as they stand there."""

import json
import re
import shlex
from pathlib import Path

import pytest

from costmodel.cli.main import main

ROOT = Path(__file__).parents[3]
QUESTIONS, _ = (ROOT / "docs/cost-model.md").read_text().split("On this machine", 1)
COMMANDS = [command for command in re.findall("`dsq-cost (.*?)`", QUESTIONS) if not command.startswith("calibrate")]
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 1000, "n_positions": 128}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_answers_within_a_terminals_width(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analysis").symlink_to(ROOT / "analysis")
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"n_embd": 64, "n_layer": 2, "n_head": 4}))
    assert main(shlex.split(command)) == 0
    answer = capsys.readouterr().out
    assert len(answer.splitlines()) > 3
    assert max(map(len, answer.splitlines())) < 100


def test_each_question_has_its_command():
    assert {command.split()[0] for command in COMMANDS} == {"plan", "roofline", "estimate", "table"}
