"""What an installed package promises: its version, its types in the README's own words, what it needs."""

import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsq

ROOT = Path(__file__).parents[1]
#: what the README's snippet takes as given, and what it is to give back
AROUND = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4))
batches, x = [0], torch.randn(4, 4)
def train(model: nn.Module, batch: int) -> None: ...
"""
AFTER = """
same: nn.Sequential = dsq.convert(model)
packed: dsq.Packed = dsq.pack(x, dsq.BFP(4))
dsq.set_level(model, config, 1)
rose: bool = dynamic.step(1.0)
y: torch.Tensor = dsq.quantize(x, dsq.BFP(4))
version: str = dsq.__version__
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_readmes_code_is_typed(tmp_path):
    pytest.importorskip("mypy")
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert snippets
    (tmp_path / "snippets.py").write_text("\n".join([AROUND, *snippets, AFTER]))
    options = ["--strict", "--config-file=", "--follow-imports=silent"]
    options += ["--cache-dir", ".mypy_cache/snippets"]  # other options than make lint's would spoil its cache
    done = run("-m", "mypy", *options, str(tmp_path / "snippets.py"))
    assert done.returncode == 0, done.stdout


def test_every_public_name_has_an_example_that_runs():
    page = ROOT / "docs" / "reference.md"
    assert doctest.testfile(str(page), module_relative=False).failed == 0
    examples = "".join(example.source for example in doctest.DocTestParser().get_examples(page.read_text()))
    missing = [name for name in dsq.__all__ if not re.search(rf"\bdsq\.{name}\b", examples)]
    assert missing == []


def test_plots_are_an_extra():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not {"pandas", "matplotlib"} & set(needed)
    block = "import sys; sys.modules.update(dict.fromkeys(('pandas', 'matplotlib', 'transformers', 'fairseq')));"
    use = "import torch, dsq; dsq.convert(torch.nn.Sequential(torch.nn.Linear(4, 4))); print(dsq.__version__)"
    done = run("-c", f"{block} {use}")
    assert done.stdout.strip() == dsq.__version__, done.stderr
    command = "from costmodel.cli.main import main; sys.exit(main(sys.argv[1:]))"
    question = ("[16,4,4,16]", "--workload", "roberta_base_mnli", "--hardware", "h100")
    assert run("-c", f"{block} {command}", "estimate", *question).returncode == 0
    done = run("-c", f"{block} {command}", "roofline", *question, "--picture", "none.png")
    assert done.returncode == 2
    assert done.stderr == "dsq-cost roofline: error: matplotlib is not installed: pip install 'dsq-torch[plots]'\n"
