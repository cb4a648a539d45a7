"""The questions of docs/cost-model.md: its commands and ten answers, as they stand there."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dsq.costmodel.cli.commands.step import plan
from dsq.costmodel.cli.main import main, parser

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/cost-model.md").read_text()
QUESTIONS, _ = PAGE.split("On this machine", 1)
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


# ---- the ten questions

ROWS = re.findall(r"^\| `(.*?)` \| (.*?) \|$", PAGE.split("| `dsq-cost plan` | answer |")[1], re.MULTILINE)[:10]


@pytest.mark.parametrize(("question", "stated"), ROWS, ids=[question.split()[0] for question, _ in ROWS])
def test_an_answer_is_the_pages(question, stated):
    answer = plan(parser().parse_args(["plan", *shlex.split(question)]))
    best = next(record for record in answer.sections[0].records if record["method"] == answer.facts["best"])
    method, gigabytes, milliseconds = re.match(r"(.*): ([\d.,]+) GB, .*?; ([\d,]+) ms", stated).groups()
    assert method == best["method"]
    assert float(gigabytes) == pytest.approx(best["peak_GB"], abs=0.06)
    assert float(milliseconds.replace(",", "")) == pytest.approx(best["step_ms"], rel=0.01, abs=0.6)
