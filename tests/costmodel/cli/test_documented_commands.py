"""The questions of docs/cost-model.md: its commands as they stand there, and ten answers beside sums by hand."""

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


def test_each_question_has_its_command():
    assert {command.split()[0] for command in COMMANDS} == {"plan", "roofline", "estimate", "table"}


# ---- the ten questions

ROWS = re.findall(r"^\| `(.*?)` \| (.*?) \|$", PAGE.split("| `dsq-cost plan` | answer |")[1], re.MULTILINE)[:10]

#: start of a question -> GB by hand, how near they are, operations of the products by hand, and the operations or bytes
#: a second that the device reaches
BY_HAND = {
    # 2 bytes a weight; adapters of 42e6 at 18; 32 layers' inputs; a logit's log-probability and two gradients in fp32
    "llama-3-8b": (
        *(2 * 8.03 + 0.042 * 18 + 32 * 2048 * 4096 * 2e-9 + 2048 * 128256 * 12e-9, 0.05),
        *(6 * 7.5e9 * 2048, 160e12),
    ),
    # of 4 devices: 68.5e9 weights at 4.13 bits, tables at 16, adapters of 207e6 at 18; gathered: two layers, tables;
    # a 16-bit copy of the largest weight; 80 layers' inputs. Sent: three quarters of all weights, twice
    "llama-3-70b": (
        *((68.5 * 4.13 / 8 + 4.2 + 0.207 * 18) / 4 + 2 / 80 * 35.3 + 4.2 + 0.47 + 80 * 512 * 8192 * 2e-9, 0.05),
        *(6 * 68.5e9 * 512 / 66e12 + 2 * 0.75 * 39.5e9 / 25.2e9, 1),
    ),
    # 14 bytes a weight; of 4.5 and 6.5 bits: two norms 1.6 s b h, q, k and v 2.4, attention's result 0.6, gelu_new 11,
    # masks 0.3; logits
    "gpt2": (0.1244 * 14 + 15.9 * 1024 * 768 * 12e-9 + 1024 * 50257 * 12e-9, 0.05, 6 * 0.124e9 * 1024, None),
    # 14 bytes a weight; 34 s b h; a logit's log-probability and two gradients in 16 bits
    "bert-base": (0.1095 * 14 + 34 * 4096 * 768 * 12e-9 + 4096 * 30522 * 6e-9, 0.05, 6 * 0.1095e9 * 4096, 32.5e12),
    # 18 bytes a weight at the update, which moves 30
    "vit-large": (0.3043 * 18, 0.02, 30 * 0.3043e9, 0.62 * 810e9),
    # 14 bytes a weight; 34 s b h in 6 layers, and 34 + 13 in 6 more; logits
    "transformer_iwslt_de_en": (0.0395 * 14 + (34 + 47) * 4096 * 512 * 6e-9 + 4096 * 6632 * 6e-9, 0.2, None, None),
    # 8 bytes a weight
    "mistral-7b": (7.248 * 8, 0.02, 6 * 7.1e9 * 2048, 271e12),
    # master weights and moments over 8 devices; 45.5 s b h: norms written out 16, attention 8, a gated MLP 21.5;
    # logits; two layers and the tables, gathered
    "llama-2-7b": (
        *(6.738 * 12 / 8 + 45.5 * 8192 * 4096 * 32e-9 + 8192 * 32000 * 12e-9 + 1.3, 0.05),
        *(6 * 6.6e9 * 8192, 791e12),
    ),
    # 2 bytes a weight; adapters of 18.5e6 at 18; logits; 63.4 s b h, with an MLP 5.83 times as wide as the model
    "qwen2.5-1.5b": (1.5437 * 2 + 0.0185 * 18 + 1024 * 151936 * 12e-9 + 63.4 * 1024 * 1536 * 28e-9, 0.05, None, None),
    # 14 bytes a weight; 34 s b h, each norm 6 more, an MLP's mask 4; cross-attention 13 and a norm; logits
    "t5-base": (0.2229 * 14 + (50 + 69) * 8 * 512 * 768 * 12e-9 + 8 * 512 * 32128 * 6e-9, 0.05, None, None),
}


@pytest.mark.parametrize(("question", "stated"), ROWS, ids=[question.split()[0] for question, _ in ROWS])
def test_an_answer_is_the_pages_and_near_a_sum_by_hand(question, stated):
    answer = plan(parser().parse_args(["plan", *shlex.split(question)]))
    best = next(record for record in answer.sections[0].records if record["method"] == answer.facts["best"])
    method, gigabytes, milliseconds = re.match(r"(.*): ([\d.,]+) GB, .*?; ([\d,]+) ms", stated).groups()
    assert method == best["method"]
    assert float(gigabytes) == pytest.approx(best["peak_GB"], abs=0.06)
    assert float(milliseconds.replace(",", "")) == pytest.approx(best["step_ms"], rel=0.01, abs=0.6)
    size, near, work, rate = BY_HAND[question.split()[0]]
    assert best["peak_GB"] == pytest.approx(size, rel=near)
    if rate:
        assert 1 <= best["step_ms"] / 1e3 / (work / rate) <= 2.5
